"""Test verification on a GPU or the fake CUDA runtime, each test in its own process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import programs
from fake_cuda.recorder import is_running
from ptx_backend import build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def run(code: str, cache: Path, **variables: str) -> str:
    """Return the output of a program with the records in a folder."""
    return programs.output(code, AMP_EXT_VERIFY="1", XDG_CACHE_HOME=str(cache), **variables)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return PTX with an unscale_ that adds the factor, and products with b transposed."""
    edits = {
        "lists_unscale": (r"\bmul\.(rn\.)?f32", "add.f32"),
        "sm80_gemm_f16": (r"(ldmatrix\S*)\.trans\b", r"\1"),
    }
    return build.edited("80", tmp_path_factory.mktemp("broken"), edits)


TRAIN = """
    import warnings
    import torch
    import amp_ext
    from amp_ext import _C, verify

    def train(scaler_class, gemm):
        _C.set_gemm_mode(gemm)
        torch.manual_seed(0)
        layers = torch.nn.Linear(7, 40), torch.nn.ReLU(), torch.nn.Linear(40, 3)
        model = torch.nn.Sequential(*layers).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = scaler_class("cuda", init_scale=2.0**10)
        for factor in (1.0, torch.inf, 1.0):
            optimizer.zero_grad()
            with amp_ext.autocast("cuda", dtype=torch.float16):
                loss = model(torch.randn(5, 7, device="cuda")).square().mean()
            scaler.scale(loss.float() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        return [*(p.detach() for p in model.parameters()), torch.tensor(scaler.get_scale())]

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        ours = train(amp_ext.GradScaler, "kernel")
    theirs = train(torch.amp.GradScaler, "library")
    assert all(x.isfinite().all() and torch.equal(x, y) for x, y in zip(ours, theirs))
    print(*(x.message for x in warned), sep="\\n")
    for results in verify._known.values():
        print("right:", *(name for name, x in sorted(results.items()) if not x.failure))
    """


@pytest.mark.skipif(not is_running(), reason="broken kernels are for the fake runtime")
def test_training_goes_on_without_broken_kernels_on_a_gpu(broken: Path, tmp_path: Path) -> None:
    settings = {"CUDASIM_PTX": str(broken.parent), "FAKE_CUDA_CAPABILITY": "80"}
    for _ in range(2):  # by verifying, and by the record
        *warnings, right = run(TRAIN, tmp_path, **settings).splitlines()
        warnings.sort()
        assert len(warnings) == 2
        for warning, family in zip(warnings, ("gemm_sm80_f16", "unscale"), strict=True):
            assert f"the cuda kernels of {family} did not pass their verification" in warning
            assert "expected" in warning
        assert right == "right: cuda update_scale"


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
    [
        pytest.param(CAPTURE, id="nothing is verified in a capture"),
        pytest.param(CAPTURE_BY_ANOTHER_THREAD, id="which is not ended by another thread"),
        pytest.param(THREADS, id="threads, devices and modes"),
    ],
)
def test_the_first_use_on_a_gpu(use: str, tmp_path: Path) -> None:
    run(ONE_STEP + use, tmp_path)
