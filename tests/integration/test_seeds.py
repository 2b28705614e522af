"""Train programs written for torch.cuda.amp, by the names of amp_ext, on each backend.

On a GPU, these are the names of amp_ext.cuda.amp. On a CPU, where those disable themselves, they
are an FP16 region and a scaler of the CPU.
"""

import contextlib
import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_ext
from amp_ext import _C
from executors import EXECUTORS, Executor
from fake_cuda.recorder import Calls, is_running, recorded

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
FP16, FP32 = torch.float16, torch.float32


def train(device: torch.device, model: Any, batches: Any, loss_of: Any, max_norm: float) -> Any:
    names = amp_ext.cuda.amp
    autocast, new_scaler = names.autocast, names.GradScaler
    if device.type == "cpu":
        autocast = partial(amp_ext.autocast, "cpu", dtype=FP16)
        new_scaler = partial(amp_ext.GradScaler, "cpu")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = new_scaler()

    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        with autocast():
            outputs = model(inputs)
            loss = loss_of(outputs, targets)
        scaler.scale(loss).backward()
        if max_norm < torch.inf:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return model, optimizer, scaler, outputs, losses


def checkerboard(device: torch.device, script: bool = False) -> Any:
    axis = torch.arange(16) / 16
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    inputs = torch.stack([x, y]).unsqueeze(0).to(device)
    targets = (inputs * 8).floor().sum(dim=1, keepdim=True).remainder(2)
    layers = []
    for channels in (2, 16, 16):
        layers += [nn.Conv2d(channels, 16, 1), nn.BatchNorm2d(16), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Conv2d(16, 1, 1)).to(device)
    model = torch.jit.script(model) if script else model
    return train(device, model, [(inputs, targets)] * 6, F.mse_loss, torch.inf)


def digits(device: torch.device) -> Any:
    generator = torch.Generator().manual_seed(0)
    images = [torch.rand(8, 1, 28, 28, generator=generator).to(device) for _ in range(3)]
    batches = [(x, torch.arange(8, device=device)) for x in images * 2]
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    return train(device, model.to(device), batches, F.cross_entropy, 1.0)


PROGRAMS = {
    "checkerboard": checkerboard,
    "checkerboard scripted": partial(checkerboard, script=True),
    "digits": digits,
}
CPU, *OTHERS = EXECUTORS[1:]
KERNELS = [
    pytest.param(e, id=e.name, marks=[pytest.mark.full] if e.interpreted else [])
    for e in (CPU, *OTHERS)
    if not e.missing
]
# The least numbers of launches of a step of digits. TMA can load and store the product of the first
# layer and of its weight's gradient.
LAUNCHES_A_STEP = {"unscale_kernel": 1, "update_scale_kernel": 1, "gemm_": 2}


def trained(name: str, executor: Executor, gemm_mode: str) -> Any:
    torch.manual_seed(0)
    with executor.chosen(), torch.jit.optimized_execution(False):  # a driver compiles its kernels
        if executor.device.type == "cuda":
            _C.set_gemm_mode(gemm_mode)
        return PROGRAMS[name](executor.device)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_trains(name: str, kernels: Executor) -> None:
    """Each program trains in FP16 on each backend; weights and optimizer stay FP32.

    Losses are within 1 in 128 of the CPU's: both add up the same products in FP32, in another
    order. Their roundings to FP16 then differ by no more than one spacing, 2**-10. A gradient has 8
    such numbers on its way or fewer. On a GPU, other ops of a region differ from a CPU's: there
    torch's library computes the products for comparison.
    """
    *_, expected = trained(name, kernels if kernels.device.type == "cuda" else CPU, "library")
    with recorded() if is_running() else contextlib.nullcontext(Calls()) as calls:
        model, optimizer, scaler, outputs, losses = trained(name, kernels, "kernel")
    if kernels is not CPU:
        assert losses == pytest.approx(expected, rel=2.0**-7)
    half = len(losses) // 2
    assert sum(losses[half:]) < sum(losses[:half])
    state = [value for values in optimizer.state.values() for value in values.values()]
    assert {t.dtype for t in (*model.parameters(), *state)} == {FP32}
    assert outputs.dtype == FP16
    assert scaler.get_skipped_steps() == 0
    if is_running() and name == "digits":
        launches = "\n".join(calls.of("launch"))
        for kernel, count in LAUNCHES_A_STEP.items():
            assert len(re.findall(rf"\b{kernel}", launches)) >= count * len(losses), kernel
