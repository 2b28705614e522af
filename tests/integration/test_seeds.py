"""Train the seed programs with other names for the import of autocast and GradScaler.

On a GPU, these are the names of amp_ext.cuda.amp. On a CPU, where those disable themselves, they
are an FP16 region and a scaler of the CPU; there the CUDA and Triton kernels run as PTX and
interpreted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import amp_ext
from amp_ext import _C
from executors import EXECUTORS, PTX_SM90, Executor, native
from ptx_backend.backend import ptx

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
TEXT = Path(__file__).with_name("seed_programs.py").read_text()
FP16, FP32 = torch.float16, torch.float32


def programs(device: torch.device) -> dict[str, Any]:
    """Return the programs with the names of amp_ext, on a device."""
    names = {"autocast": amp_ext.cuda.amp.autocast, "GradScaler": amp_ext.cuda.amp.GradScaler}
    if device.type == "cpu":
        names["autocast"] = partial(amp_ext.autocast, "cpu", dtype=FP16)
        names["GradScaler"] = partial(amp_ext.GradScaler, "cpu")
    line = "from torch.cuda.amp import GradScaler, autocast\n"
    assert TEXT.count(line) == 1
    space: dict[str, Any] = {"__name__": "seeds", **names}
    exec(TEXT.replace(line, ""), space)
    space["device"] = device
    return space


def small_images() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.rand(8, 1, 28, 28, generator=generator), torch.arange(8)) for _ in range(3)]


TRAININGS: dict[str, Callable[[Any], Any]] = {
    "checkerboard": lambda space: space["checkerboard"](size=16, width=16, steps=6),
    "regression": lambda space: space["regression"](count=320, epochs=2),
    "digits": lambda space: space["digits"](small_images(), epochs=2),
    "checkerboard scripted": lambda space: space["checkerboard"](16, 16, steps=6, script=True),
}
CPU, *OTHERS = EXECUTORS[1:]
KERNELS = [
    pytest.param(e, id=e.name, marks=[pytest.mark.full] if e.interpreted else [])
    for e in (CPU, *OTHERS, PTX_SM90)
    if not e.missing
]
# The least numbers of calls of a step of digits. Products of two layers run forward, for weights,
# and for the gradient between the layers.
CALLS_A_STEP = {"unscale": 1, "update_scale": 1, "gemm": 5}


def trained(name: str, executor: Executor, gemm_mode: str) -> Any:
    torch.manual_seed(0)
    with executor.chosen(), torch.jit.optimized_execution(False):  # a driver compiles its kernels
        if executor.device.type == "cuda":
            _C.set_gemm_mode(gemm_mode)
        return TRAININGS[name](programs(executor.device))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", TRAININGS)
def test_trains(name: str, kernels: Executor) -> None:
    """Each program trains in FP16 on each backend; weights and optimizer stay FP32.

    Losses are within 1 in 128 of the CPU's: both add up the same products in FP32, in another
    order. Their roundings to FP16 then differ by no more than one spacing, 2**-10. A gradient has 8
    such numbers on its way or fewer. On a GPU, other ops of a region differ from a CPU's: there
    torch's library computes the products for comparison.
    """
    *_, expected = trained(name, kernels if kernels.device.type == "cuda" else CPU, "library")
    calls = {op: ptx().calls(op) for op in CALLS_A_STEP if kernels.backend == "ptx"}
    model, optimizer, scaler, outputs, losses = trained(name, kernels, "kernel")
    if kernels is not CPU:
        assert losses == pytest.approx(expected, rel=2.0**-7)
    half = len(losses) // 2
    assert sum(losses[half:]) < sum(losses[:half])
    state = [value for values in optimizer.state.values() for value in values.values()]
    assert {t.dtype for t in (*model.parameters(), *state)} == {FP32}
    assert outputs.dtype == FP16
    assert scaler.get_skipped_steps() == 0
    for op, count in calls.items() if name == "digits" else ():
        assert ptx().calls(op) - count >= CALLS_A_STEP[op] * len(losses), op
        assert ptx().plan().startswith("sm90") == kernels.sm90


@native
def test_rules(executor: Executor) -> None:
    """Sums keep the wider dtype, products are FP16; losses of large logits are finite and FP32."""
    space = programs(executor.device)
    assert space["operand_dtypes"]() == [FP32, FP32, FP16]
    assert space["softmax"]() == ([[1.0, 0.0]], 1000.0, FP32)
