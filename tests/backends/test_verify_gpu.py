"""Test verification on a GPU or the fake CUDA runtime, each test in its own process."""

from pathlib import Path

import pytest
import torch

import programs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


ONE_STEP = """
    import threading, pytest, torch
    from amp_ext import ops, verify

    def step(device):
        grad, found_inf, inv_scale = (
            torch.full((), x, dtype=torch.float32, device=device) for x in (8.0, 0.0, 0.5)
        )
        ops.unscale_([grad], found_inf, inv_scale)
        return grad

    def failures():
        results = [result for known in verify._known.values() for result in known.items()]
        return [result.failure for name, result in results if "unscale" in name]
    """

CAPTURE = """
    graph = torch.cuda.CUDAGraph()
    grad, found_inf, inv_scale = (torch.full((), x, device="cuda") for x in (8.0, 0.0, 0.5))
    with pytest.raises(RuntimeError, match="run one step before"), torch.cuda.graph(graph):
        ops.unscale_([grad], found_inf, inv_scale)
    assert not any(verify._known.values())
    assert step("cuda").item() == 4.0 and set(failures()) == {""}
    """

CAPTURE_BY_ANOTHER_THREAD = """
    graph, x = torch.cuda.CUDAGraph(), torch.zeros((), device="cuda")
    capturing, verified = threading.Event(), threading.Event()
    grad, found_inf, inv_scale = (torch.full((), x, device="cuda") for x in (8.0, 0.0, 0.5))
    torch.cuda.synchronize()

    def use():
        capturing.wait()
        ops.unscale_([grad], found_inf, inv_scale)
        verified.set()

    thread = threading.Thread(target=use)
    thread.start()
    with torch.cuda.graph(graph):
        capturing.set()
        verified.wait()
        x.add_(1)
    thread.join()
    graph.replay()
    assert x.item() == 1 and grad.item() == 4.0 and set(failures()) == {""}
    """

THREADS = """
    results = []

    def use(index):
        with torch.inference_mode(), torch.autocast("cuda"):
            results.append(step(f"cuda:{index % torch.cuda.device_count()}").item())

    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(torch.float64)
    threads = [threading.Thread(target=use, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [4.0] * 4 and set(failures()) == {""}
    """


@pytest.mark.parametrize(
    "use",
    [CAPTURE, CAPTURE_BY_ANOTHER_THREAD, THREADS],
    ids=["nothing is verified in a capture", "another thread does not end it", "threads"],
)
def test_the_first_use_on_a_gpu(use: str, tmp_path: Path) -> None:
    programs.output(ONE_STEP + use, AMP_EXT_VERIFY="1", XDG_CACHE_HOME=str(tmp_path))
