"""Test the seed programs for 300 steps with a few overflows, by amp_ext.optim and by torch."""

from __future__ import annotations

import math

import pytest
import torch

import amp_ext
from test_programs_on_kernels import PROGRAMS
from workloads import checkerboard
from workloads.common import LEARNING_RATE

STEPS = 300
OVERFLOWS = {0: math.inf, 7: math.nan, 8: -math.inf, 150: math.nan, 299: math.inf}


@pytest.mark.parametrize("name", PROGRAMS)
def test_follows_torchs_fused_adam(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """amp_ext.optim follows torch's fused Adam on torch's gradients and parameters of its own.

    Let u = 2**-24. A step rounds a parameter twice, to u times its size each, in both. The unit is
    the root of the second moment. A gradient g of k steps ago is at least sqrt(0.001 * 0.999**k).
    It has contributed 0.1 * 0.9**k * g to the first moment, with the roundings of k steps. Their
    sum over k is below 0.1 / sqrt(0.001) * 10 * 10 = 320 u. Three times that covers both, and the
    moments' own corrections: 1000 u of a learning rate a step.
    """
    monkeypatch.setattr(checkerboard, "WIDTH", 16)
    cpu = torch.device("cpu")
    trainer = PROGRAMS[name](cpu)
    theirs = list(trainer.network.parameters())
    trainer.optimizer = torch.optim.Adam(theirs, lr=LEARNING_RATE, fused=True)
    ours = [torch.nn.Parameter(param.detach().clone()) for param in theirs]
    optimizer = amp_ext.optim.Adam(ours, lr=LEARNING_RATE)
    scaler = amp_ext.GradScaler("cpu")
    scaler.scale(torch.ones(()))

    largest = 0.0
    for i in range(STEPS):
        trainer.advance()
        trainer.optimizer.zero_grad()
        with trainer.autocast():
            loss = trainer.loss(trainer.network(trainer.inputs), trainer.targets)
        trainer.scaler.scale(loss).backward()
        if i in OVERFLOWS:
            theirs[i % len(theirs)].grad.view(-1)[-1] = OVERFLOWS[i]
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = other.grad.clone()
        for each, stepping in ((trainer.scaler, trainer.optimizer), (scaler, optimizer)):
            each.step(stepping)
            each.update()
        assert scaler.get_scale() == trainer.scaler.get_scale()
        largest = max(largest, *(param.abs().max().item() for param in theirs))

    skipped = scaler.get_skipped_steps()
    assert skipped == trainer.scaler.get_skipped_steps() >= len(OVERFLOWS)
    u = 2.0**-24
    most = STEPS * (4 * u * largest + 1000 * u * LEARNING_RATE)
    for mine, other in zip(ours, theirs, strict=True):
        assert optimizer.state[mine]["step"] == trainer.optimizer.state[other]["step"]
        assert optimizer.state[mine]["step"] == STEPS - skipped
        torch.testing.assert_close(mine, other, rtol=0, atol=most)
