"""Print the host's microseconds for products, list ops and a step, with launches dropped.

Products and list ops run by the CUDA and the Triton kernels, a step of many small parameters by the
CUDA kernels.

    python tests/fake_cuda/host_cost.py

The figures are the best of several rounds. They include the calls of the fake runtime, and no
driver.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

import amp_ext
from amp_ext import _C, GradScaler, ops
from amp_ext.optim import AdamW
from fake_cuda.recorder import is_running

ROUNDS, CALLS = 7, 2000
STEPS = 100
PARAMETERS, ELEMENTS = 4000, 4
SHAPES = {"4096 x 4096 x 4096": (4096, 4096, 4096), "64 x 768 x 3072": (64, 768, 3072)}


def best_us(call: Callable[[int], float], calls: int = CALLS) -> float:
    call(calls // 20)
    return 1e6 / calls * min(call(calls) for _ in range(ROUNDS))


def repeated(function: Callable[[], object]) -> Callable[[int], float]:
    def run(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            function()
        return time.perf_counter() - start

    return run


def measure_product(backend: str, m: int, n: int, k: int) -> dict[str, float]:
    a = torch.empty(m, k, device="cuda", dtype=torch.float16)
    b = torch.empty(k, n, device="cuda", dtype=torch.float16)
    op = torch.ops.amp_ext.gemm.default
    assert _C.gemm_choice(a, b)[0] == backend
    assert _C.start_noting()
    op(a, b)
    (product,) = _C.stop_noting()
    trial = _C.Trial(product)
    return {
        "torch.empty, of the result": best_us(repeated(lambda: a.new_empty(m, n))),
        "checks and choice, from Python": best_us(repeated(lambda: _C.gemm_choice(a, b))),
        "plan, tensor maps, launches": best_us(lambda times: trial.run(backend, 0, times)),
        "the op, from Python": best_us(repeated(lambda: op(a, b))),
    }


def measure_lists() -> dict[str, float]:
    grads = [torch.zeros(ELEMENTS, device="cuda") for _ in range(2)]
    found_inf, inv_scale = torch.zeros(1, device="cuda"), torch.ones(1, device="cuda")
    return {
        "check_finite": best_us(repeated(lambda: ops.check_finite(grads, found_inf))),
        "unscale_": best_us(repeated(lambda: ops.unscale_(grads, found_inf, inv_scale))),
    }


def measure_step() -> dict[str, float]:
    zeros = [torch.zeros(ELEMENTS, device="cuda") for _ in range(PARAMETERS)]
    parameters = [torch.nn.Parameter(each) for each in zeros]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    scaler, optimizer = GradScaler("cuda"), AdamW(parameters)
    scaler.scale(torch.zeros((), device="cuda"))

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    def clipped_step() -> None:
        scaler.clip_grad_norm_(optimizer, 1.0)
        step()

    return {
        "scaler.step of AdamW, update": best_us(repeated(step), STEPS),
        "clip_grad_norm_, scaler.step of AdamW, update": best_us(repeated(clipped_step), STEPS),
    }


def show(title: str, measured: dict[str, float]) -> None:
    print(title)
    for what, us in measured.items():
        print(f"  {us:7.3f} us  {what}")


def main() -> None:
    if not is_running():
        os.environ.update(AMP_EXT_GEMM="kernel", AMP_EXT_VERIFY="0")
        run = str(Path(__file__).with_name("run.py"))
        command = [sys.executable, run, "--multiprocessors", "132", *sys.argv]
        os.execv(sys.executable, command)
    ctypes.CDLL(None).fake_cuda_drop_launches(ctypes.c_bool(True))
    for backend in ("triton", "cuda"):
        amp_ext.set_backend(backend)
        for name, sizes in SHAPES.items():
            show(f"{backend}, {name}", measure_product(backend, *sizes))
        show(f"{backend}, 2 tensors of {ELEMENTS} elements", measure_lists())
    step = {what: us / PARAMETERS for what, us in measure_step().items()}
    show(f"{backend}, a step of {PARAMETERS} parameters, for each of them", step)


main()
