"""Train the seed programs on the CUDA and Triton kernels: as PTX, on a GPU, interpreted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from amp_ext import _C
from executors import EXECUTORS, PTX, PTX_SM90, Executor
from ptx_backend.backend import ptx
from workloads import checkerboard, digits, regression
from workloads.common import Trainer, epochs

STEPS = 20
CPU_KERNELS, CUDA, TRITON = EXECUTORS[1:4]
KERNELS = [
    pytest.param(e, id=e.name, marks=[pytest.mark.full] if e.interpreted else [])
    for e in (PTX, PTX_SM90, CUDA, TRITON)
    if not e.missing
]


# The least numbers of calls. Products of two layers run forward, for weights, and for the gradient
# between the layers.
CALLS_A_STEP = {"unscale": 1, "grad_norm": 1, "update_scale": 1, "gemm": 5}


def small_images() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(4, 8, digits.SIDE, digits.SIDE, generator=generator)
    return [(batch, torch.arange(8)) for batch in images]


# Programs of a size for seconds on the engine: 16 x 16 pixels, 16 channels, batches of 8 images.
PROGRAMS: dict[str, Callable[[torch.device], Trainer]] = {
    "checkerboard": lambda device: checkerboard.training("amp_ext", device, 16),
    "regression": lambda device: regression.training("amp_ext", device, regression.batches()),
    "digits": lambda device: digits.training("amp_ext", device, epochs(small_images(), device)),
}


def freeze_idle_biases(network: nn.Module) -> None:
    """Freeze biases in front of a batch norm: the norm removes them again.

    Their gradients are rounding errors alone, and Adam would turn these into full steps.
    """
    for layer, after in pairwise(network.modules()):
        if isinstance(after, nn.BatchNorm2d):
            layer.bias.requires_grad_(False)


def train(
    executor: Executor,
    program: Callable[[torch.device], Trainer],
    steps: int,
    by_library: bool = False,
    fp32: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses, and all parameters before and after training."""
    with executor.chosen():
        if by_library or executor.device.type == "cuda":
            _C.set_gemm_mode("library" if by_library else "kernel")
        trainer, losses = program(executor.device), []
        freeze_idle_biases(trainer.network)
        parameters = list(trainer.network.parameters())
        before = torch.cat([p.detach().flatten() for p in parameters])
        for _ in range(steps):
            trainer.advance()
            trainer.optimizer.zero_grad()
            with nullcontext() if fp32 else trainer.autocast():
                loss = trainer.loss(trainer.network(trainer.inputs), trainer.targets)
            trainer.scaler.scale(loss).backward()
            trainer.scaler.clip_grad_norm_(trainer.optimizer, 1.0)
            trainer.scaler.step(trainer.optimizer)
            trainer.scaler.update()
            losses.append(loss.item())
        after = torch.cat([p.detach().flatten() for p in parameters])
    return torch.tensor(losses), before.cpu(), after.cpu()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_trains_as_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, name: str, kernels: Executor
) -> None:
    """Losses on the kernels are within 1 in 128 of the CPU's, and so are the parameters' ways.

    The ways may also differ by no more than FP16 takes them off the way in FP32. Both add up the
    same products in FP32, in another order; their roundings to FP16 then differ by no more than one
    spacing, 2**-10. A gradient has 8 such numbers on its way or fewer. Adam's steps are ratios of
    gradients, including gradients of little more than rounding errors: with them the ways part, as
    from FP32's way. (The processor of the compared library decides by how much: from 1 in 10,000 to
    1 in 90 were seen.)

    A region on CUDA has other operators in FP32 than one on a CPU: there torch's library computes
    the products for comparison.
    """
    monkeypatch.setattr(checkerboard, "WIDTH", 16)
    steps, on_cuda = 3 if kernels.interpreted else STEPS, kernels.device.type == "cuda"
    library = kernels if on_cuda else CPU_KERNELS
    losses, before, after = train(library, PROGRAMS[name], steps, by_library=on_cuda)
    _, _, fp32_after = train(library, PROGRAMS[name], steps, by_library=on_cuda, fp32=True)
    is_counted = kernels.backend == "ptx"
    before_calls = {op: ptx().calls(op) for op in CALLS_A_STEP if is_counted}
    their_losses, _, their_after = train(kernels, PROGRAMS[name], steps)
    for op, count in before_calls.items():
        assert ptx().calls(op) - count >= CALLS_A_STEP[op] * steps, op
    if name == "digits" and kernels.backend == "ptx":
        assert ptx().plan().startswith("sm90") == kernels.sm90
    assert ((their_losses - losses).abs() <= 2.0**-7 * losses).all()
    reach = max(2.0**-7 * (after - before).norm(), (fp32_after - after).norm())
    assert (their_after - after).norm() <= reach
    assert not after.equal(before)
