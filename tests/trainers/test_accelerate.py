"""Test Accelerate on the digits program."""

from __future__ import annotations

import collections
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import digits_program as digits

accelerate = pytest.importorskip("accelerate", reason="needs it, as in make test-trainers")
ours = pytest.importorskip("amp_ext.integrations.accelerate")
pytestmark = pytest.mark.usefixtures("one_accelerator")


class Training:
    def __init__(self, optimizer: str, accelerator: Any) -> None:
        self.accelerator = accelerator
        network = digits.Network()
        stepping = digits.OPTIMIZERS[optimizer](network.parameters())
        self.network, self.optimizer, self.loader, self.schedule = accelerator.prepare(
            network,
            stepping,
            DataLoader(digits.samples(), digits.BATCH),
            torch.optim.lr_scheduler.ConstantLR(stepping, 1.0),
        )
        self.skipped: list[bool] = []

    def steps(self) -> Training:
        for images, labels in self.loader:
            with self.accelerator.accumulate(self.network):
                self.accelerator.backward(self.network(images, labels))
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.network.parameters(), digits.MAX_NORM)
                self.optimizer.step()
                self.schedule.step()
                if self.accelerator.sync_gradients:
                    self.skipped.append(self.accelerator.optimizer_step_was_skipped)
                self.optimizer.zero_grad()
        return self


def fp16(**arguments: Any) -> Any:
    return accelerate.Accelerator(mixed_precision="fp16", **arguments)


@digits.on_cuda
@digits.every_optimizer
def test_training_is_the_loop(
    device: str, optimizer: str, calls: collections.Counter[str], installed: None
) -> None:
    handler = accelerate.utils.GradScalerKwargs(growth_interval=1000)
    accelerator = ours.with_scaler(fp16(kwargs_handlers=[handler]))
    training = Training(optimizer, accelerator).steps()
    assert accelerator.scaler.get_growth_interval() == 1000
    assert calls == {"clip": digits.STEPS}
    assert training.skipped == [step == digits.OVERFLOW for step in range(digits.STEPS)]
    assert training.schedule.scheduler.last_epoch == digits.STEPS - 1
    digits.assert_learned(training.network)
    digits.assert_same(training.network, digits.written_out(optimizer))


@digits.on_cuda
def test_accumulation(device: str, calls: collections.Counter[str]) -> None:
    training = Training(
        "amp_ext.optim", ours.with_scaler(fp16(gradient_accumulation_steps=2))
    ).steps()
    assert training.skipped == [False, True, False]
    assert calls == {"clip": digits.STEPS // 2}


@digits.on_cuda
def test_each_optimizer_knows_its_own_skip(device: str) -> None:
    accelerator = ours.with_scaler(fp16())
    weights = [torch.nn.Parameter(torch.ones(2, device=device)) for _ in range(2)]
    optimizers = [accelerator.prepare(digits.OPTIMIZERS["fused"]([weight])) for weight in weights]
    for weight, factor in zip(weights, (torch.inf, 1.0), strict=True):
        accelerator.backward((weight * factor).sum())
    for optimizer, weight in zip(optimizers, weights, strict=True):
        accelerator.clip_grad_norm_([weight], digits.MAX_NORM)
        optimizer.step()
    assert [optimizer.step_was_skipped for optimizer in optimizers] == [True, False]
    assert accelerator.optimizer_step_was_skipped
    assert not pickle.loads(pickle.dumps(optimizers[1])).step_was_skipped


@digits.on_cuda
@pytest.mark.parametrize("clipped", [1, 2])
def test_optimizers_are_clipped_in_turn(device: str, clipped: int) -> None:
    """Optimizers are clipped in turn: Accelerate updates the scaler after each step.

    An earlier clip of another optimizer, or of both at once, would be lost.
    """
    accelerator = ours.with_scaler(fp16())
    weights = [torch.nn.Parameter(torch.ones(2, device=device)) for _ in range(2)]
    optimizers = [accelerator.prepare(digits.OPTIMIZERS["fused"]([weight])) for weight in weights]
    accelerator.backward(sum(weight.sum() for weight in weights))
    accelerator.clip_grad_norm_(weights[:clipped], digits.MAX_NORM)
    with pytest.raises(RuntimeError, match="one optimizer after the other"):
        optimizers[2 - clipped].step()


@digits.on_cuda
def test_an_accelerator_of_ones_own_clips_at_every_micro_step(device: str) -> None:
    class Own(accelerate.Accelerator):
        def hello(self) -> str:
            return "hello"

    accelerator = ours.with_scaler(Own(mixed_precision="bf16", gradient_accumulation_steps=2))
    weight = torch.nn.Parameter(torch.ones(2, device=device))
    optimizer = accelerator.prepare(digits.OPTIMIZERS["plain"]([weight]))
    for _ in range(4):
        with accelerator.accumulate():
            accelerator.backward(weight.sum())
            accelerator.clip_grad_norm_([weight], digits.MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    assert (isinstance(accelerator, Own), accelerator.hello()) == (True, "hello")
    assert weight.lt(1).all()


@digits.on_cuda
def test_a_guard_for_bfloat16(device: str) -> None:
    accelerator = ours.with_scaler(accelerate.Accelerator(mixed_precision="bf16"))
    training = Training("amp_ext.optim", accelerator).steps()
    assert training.skipped == [step == digits.OVERFLOW for step in range(digits.STEPS)]
    assert accelerator.scaler.get_scale() == 1.0
    digits.assert_learned(training.network)


@digits.on_cuda
@pytest.mark.parametrize(
    ("arguments", "prepared", "message"),
    [
        ({"mixed_precision": "fp16"}, True, "one that has prepared no optimizer"),
        ({"mixed_precision": "fp16", "cpu": True}, False, "a GPU or .bf16."),
    ],
    ids=["prepared", "cpu"],
)
def test_what_it_refuses(device: str, arguments: dict, prepared: bool, message: str) -> None:
    accelerator = accelerate.Accelerator(**arguments)
    if prepared:
        accelerator.prepare(digits.OPTIMIZERS["plain"](digits.Network().parameters()))
    scaler = accelerator.scaler
    with pytest.raises(ValueError, match=f"with_scaler: accelerator: expected {message}"):
        ours.with_scaler(accelerator)
    assert accelerator.scaler is scaler
