"""The seed programs train on the CUDA and Triton kernels, on the CPU, as on the CPU's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import amp_ext
from executors import EXECUTORS, SIMT, SIMT_SM90, Executor
from simt.backend import simt
from workloads import checkerboard, digits, regression
from workloads.common import Trainer, epochs

CPU = torch.device("cpu")
STEPS = 20
CPU_KERNELS, TRITON = EXECUTORS[1], EXECUTORS[3]
KERNELS = [
    pytest.param(e, id=e.name, marks=[pytest.mark.full] if e.interpreted else [])
    for e in (SIMT, SIMT_SM90, TRITON)
    if not e.missing and e.device == CPU
]


@pytest.fixture(autouse=True)
def cast_together() -> Iterator[None]:
    """So that the kernel of cast_ takes part."""
    amp_ext.cast_weights_together()
    yield
    amp_ext.cast_weights_together(False)


# At least; of two layers, products forward, for weights and for what lies between the layers.
CALLS_A_STEP = {"unscale": 1, "grad_norm": 1, "update_scale": 1, "cast": 1, "gemm": 5}


def small_images() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(4, 8, digits.SIDE, digits.SIDE, generator=generator)
    return [(batch, torch.arange(8)) for batch in images]


# What the engine can execute in seconds: 16 x 16 pixels and 16 channels, batches of 8 images.
PROGRAMS: dict[str, Callable[[], Trainer]] = {
    "checkerboard": lambda: checkerboard.training("amp_ext", CPU, 16),
    "regression": lambda: regression.training("amp_ext", CPU, regression.batches()),
    "digits": lambda: digits.training("amp_ext", CPU, epochs(small_images(), CPU)),
}


def train(
    executor: Executor, program: Callable[[], Trainer], steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses, and all parameters before and after."""
    with executor.chosen():
        trainer, losses = program(), []
        parameters = list(trainer.network.parameters())
        before = torch.cat([p.detach().flatten() for p in parameters])
        for _ in range(steps):
            trainer.advance()
            trainer.optimizer.zero_grad()
            with trainer.autocast():
                loss = trainer.loss(trainer.network(trainer.inputs), trainer.targets)
            trainer.scaler.scale(loss).backward()
            trainer.scaler.clip_grad_norm_(trainer.optimizer, 1.0)
            trainer.scaler.step(trainer.optimizer)
            trainer.scaler.update()
            losses.append(loss.item())
        after = torch.cat([p.detach().flatten() for p in parameters])
    return torch.tensor(losses), before, after


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_trains_as_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, name: str, kernels: Executor
) -> None:
    """Losses, and the way that the parameters go, differ by 1 in 128 at most.

    Both add up the same products in FP32, in another order; what they round to FP16 then differs by
    no more than one spacing, 2**-10 of it. A gradient has 8 such numbers on its way or fewer, and
    Adam's steps are ratios of gradients. (They do differ by 1 in 10,000, where at all.)
    """
    monkeypatch.setattr(checkerboard, "WIDTH", 16)
    steps = 3 if kernels.interpreted else STEPS
    losses, before, after = train(CPU_KERNELS, PROGRAMS[name], steps)
    counts = {} if kernels is TRITON else {op: simt().calls(op) for op in CALLS_A_STEP}
    their_losses, _, their_after = train(kernels, PROGRAMS[name], steps)
    for op, count in counts.items():
        # The first region does not know yet which weights to cast together.
        assert simt().calls(op) - count >= CALLS_A_STEP[op] * steps - (op == "cast"), op
    if name == "digits" and kernels is not TRITON:
        assert simt().plan().startswith("sm90") == kernels.sm90
    assert ((their_losses - losses).abs() <= 2.0**-7 * losses).all()
    assert (their_after - after).norm() <= 2.0**-7 * (after - before).norm()
    assert not after.equal(before)
