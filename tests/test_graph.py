"""amp_ext.CUDAGraph: a step captured on gradients that have moved is not replayed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import amp_ext
from amp_ext.graph import OnSameGradients
from free_cases import INF, Training
from twins import DEVICES, OURS, leaf, sgd, sparse_leaf, started


class Recorder:
    """What torch's class does, where there is no GPU: each call is noted."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def capture_begin(self, *_pool: Any, **_options: Any) -> None:
        self.calls.append("capture_begin")

    def capture_end(self) -> None:
        self.calls.append("capture_end")

    def replay(self) -> None:
        self.calls.append("replay")

    def reset(self) -> None:
        self.calls.append("reset")


class Graph(OnSameGradients, Recorder):
    """CUDAGraph without a GPU."""


Step = Callable[[Any, Optimizer], Any]
STEPS: dict[str, Step] = {
    "unscale": lambda scaler, optimizer: scaler.unscale_(optimizer),
    "clip": lambda scaler, optimizer: scaler.clip_grad_norm_(optimizer, 1.0),
    "step": lambda scaler, optimizer: scaler.step(optimizer),
    "fused": lambda scaler, optimizer: scaler._check_inf_per_device(optimizer),
}
every_step = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)


def two_leaves() -> Optimizer:
    return sgd(leaf([1.0, 2.0]), leaf([3.0], torch.float64))


def captured(step: Step, optimizer: Optimizer) -> Graph:
    scaler, graph = started(OURS), Graph()
    graph.capture_begin(capture_error_mode="global")
    step(scaler, optimizer)
    graph.capture_end()
    return graph


def param(optimizer: Optimizer, index: int) -> torch.Tensor:
    return optimizer.param_groups[0]["params"][index]


@every_step
def test_replays_where_gradients_are_as_they_were(step: Step) -> None:
    optimizer = two_leaves()
    graph = captured(step, optimizer)
    graph.replay()
    optimizer.zero_grad(set_to_none=False)
    param(optimizer, 0).grad.add_(1.0)
    graph.replay()
    assert graph.calls == ["capture_begin", "capture_end", "replay", "replay"]


def replaced(optimizer: Optimizer) -> None:
    param(optimizer, 1).grad = param(optimizer, 1).grad.clone()


def other_dtype(optimizer: Optimizer) -> None:
    grad = param(optimizer, 1).grad
    param(optimizer, 1).grad = None
    param(optimizer, 1).data = param(optimizer, 1).data.view(torch.int64)
    param(optimizer, 1).grad = grad.view(torch.int64)


def shorter(optimizer: Optimizer) -> None:
    grad = param(optimizer, 0).grad
    param(optimizer, 0).grad = None
    param(optimizer, 0).data = param(optimizer, 0).data[:1]
    param(optimizer, 0).grad = grad[:1]


@every_step
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda optimizer: optimizer.zero_grad(),
            r"the gradient of param_groups\[0\]\['params'\]\[0\] was 8 bytes at 0x\w+ "
            r"in the capture and is None now: capture again, or clear gradients in place",
        ),
        (replaced, r"the gradient of param_groups\[0\]\['params'\]\[1\] was 8 bytes .* is 8 bytes"),
        (other_dtype, r".*\['params'\]\[1\] was 8 bytes .* is another dtype now"),
        (shorter, r".*\['params'\]\[0\] was 8 bytes .* is 4 bytes at"),
        (
            lambda optimizer: optimizer.add_param_group({"params": [leaf([1.0])]}),
            r"the optimizer had 2 parameters in the capture and has 3 now",
        ),
    ],
    ids=["cleared", "replaced", "dtype", "size", "parameters"],
)
def test_is_not_replayed_on_other_gradients(
    step: Step, change: Callable[[Optimizer], Any], message: str
) -> None:
    optimizer = two_leaves()
    graph = captured(step, optimizer)
    kept = [p.grad for p in optimizer.param_groups[0]["params"]]  # so that no address is reused
    change(optimizer)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"^CUDAGraph\.replay: {message}"):
            graph.replay()
    assert graph.calls == ["capture_begin", "capture_end"]
    del kept


def test_names_that_the_optimizer_was_given() -> None:
    optimizer = torch.optim.SGD([("head.weight", leaf([1.0]))], lr=0.5)
    graph = captured(STEPS["unscale"], optimizer)
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"the gradient of head\.weight was"):
        graph.replay()


def test_each_of_several_optimizers() -> None:
    first, second = two_leaves(), two_leaves()
    scaler, graph = started(OURS), Graph()
    graph.capture_begin()
    for optimizer in (first, second):
        scaler.unscale_(optimizer)
    graph.capture_end()
    graph.replay()
    second.zero_grad()
    with pytest.raises(RuntimeError, match="is None now"):
        graph.replay()


@every_step
def test_gradients_that_the_step_itself_clears(step: Step) -> None:
    def step_and_clear(scaler: Any, optimizer: Optimizer) -> None:
        step(scaler, optimizer)
        optimizer.zero_grad()

    optimizer = two_leaves()
    graph = captured(step_and_clear, optimizer)
    graph.replay()
    param(optimizer, 0).grad = torch.ones(2)
    graph.replay()
    assert graph.calls[2:] == ["replay", "replay"]


def test_only_what_the_step_itself_clears_is_left_out() -> None:
    def step_and_clear_one(scaler: Any, optimizer: Optimizer) -> None:
        scaler.unscale_(optimizer)
        scaler.clip_grad_norm_(optimizer, 1.0)
        param(optimizer, 0).grad = None

    optimizer = two_leaves()
    graph = captured(step_and_clear_one, optimizer)
    graph.replay()
    param(optimizer, 0).grad = torch.ones(2)
    graph.replay()
    replaced(optimizer)
    with pytest.raises(RuntimeError, match=r"the gradient of .*\['params'\]\[1\] was 8 bytes"):
        graph.replay()


def test_reset_forgets() -> None:
    optimizer = two_leaves()
    graph, gone = captured(STEPS["unscale"], optimizer), weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is not None
    graph.reset()
    gc.collect()
    assert gone() is None
    graph.replay()
    assert graph.calls[2:] == ["reset", "replay"]


def test_a_new_capture_starts_anew() -> None:
    optimizer = two_leaves()
    graph = captured(STEPS["unscale"], optimizer)
    replaced(optimizer)
    graph.capture_begin()
    graph.capture_end()
    graph.replay()


def test_what_is_not_captured_is_not_noted() -> None:
    optimizer, graph = two_leaves(), Graph()
    scaler = started(OURS)
    graph.capture_begin()
    graph.capture_end()
    scaler.unscale_(optimizer)
    optimizer.zero_grad()
    graph.replay()


def test_gradients_without_memory_of_their_own() -> None:
    """Nothing is known of sparse ones; a parameter without a gradient has to stay so."""
    optimizer = sgd(sparse_leaf(torch.float32), torch.ones(2), leaf([1.0]))
    graph = captured(STEPS["unscale"], optimizer)
    graph.replay()
    param(optimizer, 1).grad = torch.ones(2)
    with pytest.raises(RuntimeError, match=r"\[1\] was None in the capture and is 8 bytes"):
        graph.replay()


def test_is_torchs_class() -> None:
    assert issubclass(amp_ext.CUDAGraph, torch.cuda.CUDAGraph)
    assert amp_ext.CUDAGraph.replay is OnSameGradients.replay


@pytest.mark.parametrize("device", DEVICES[1:])
def test_capture_and_replay(device: str) -> None:
    optimizer = sgd(leaf([8.0], device=device), leaf([4.0], torch.float16, device=device))
    scaler = started(OURS, device=device, allow_fp16_grads=True)
    graph = amp_ext.CUDAGraph()
    with torch.cuda.graph(graph):
        scaler.unscale_(optimizer)
    graph.replay()
    torch.cuda.synchronize()
    assert [param(optimizer, i).grad.item() for i in range(2)] == [2.0, 1.0]
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"CUDAGraph\.replay: .* is None now"):
        graph.replay()


def test_replay_forgets_verdicts() -> None:
    """A graph may have written to any gradient, and no version tells."""
    training, graph = Training(), Graph()
    training.backward()
    training.grad.data.fill_(INF)
    graph.replay()
    assert training.check() == (0, True)
    training.scaler.update()
