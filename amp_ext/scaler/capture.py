"""What a CUDA graph does on a condition that the device knows."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def can_capture_if() -> bool:
    """Whether torch has conditional nodes of CUDA graphs."""
    return hasattr(torch.cuda.CUDAGraph, "begin_capture_to_if_node")


def captures_if(device: torch.device) -> bool:
    """Whether a graph with such nodes is being captured there."""
    return device.type == "cuda" and can_capture_if() and torch.cuda.is_current_stream_capturing()


@contextmanager
def captured_if(condition: Tensor) -> Iterator[None]:
    """Captures the region into the graph that is being captured, to be run where the condition, a
    bool on the device, is true."""
    graph = torch.cuda.CUDAGraph.get_currently_capturing_graph()
    graph.begin_capture_to_if_node(condition)
    try:
        yield
    finally:
        graph.end_capture_to_conditional_node()
