"""Test Accelerate on the digits program."""

import collections
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import amp_ext
import digits_program as digits

accelerate = pytest.importorskip("accelerate", reason="needs it, as in make test-trainers")
ours = pytest.importorskip("amp_ext.integrations.accelerate")
pytestmark = digits.on_cuda


def trained(optimizer: str, accelerator: Any) -> tuple[digits.Network, list[bool], int]:
    """Return a network, whether each step was skipped, and the steps counted by a schedule."""
    network, skipped = digits.Network(), []
    stepping = digits.OPTIMIZERS[optimizer](network.parameters())
    network, stepping, loader, schedule = accelerator.prepare(
        network,
        stepping,
        DataLoader(digits.samples(), digits.BATCH),
        torch.optim.lr_scheduler.ConstantLR(stepping, 1.0),
    )
    for images, labels in loader:
        with accelerator.accumulate(network):
            accelerator.backward(network(images, labels))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(network.parameters(), digits.MAX_NORM)
            stepping.step()
            schedule.step()
            if accelerator.sync_gradients:
                skipped.append(accelerator.optimizer_step_was_skipped)
            stepping.zero_grad()
    return network, skipped, schedule.scheduler.last_epoch


def fp16(**arguments: Any) -> Any:
    return accelerate.Accelerator(mixed_precision="fp16", **arguments)


@digits.every_optimizer
def test_training_is_the_loop(optimizer: str, calls: collections.Counter[str]) -> None:
    amp_ext.install()
    handler = accelerate.utils.GradScalerKwargs(growth_interval=1000)
    accelerator = ours.with_scaler(fp16(kwargs_handlers=[handler]))
    network, skipped, scheduled = trained(optimizer, accelerator)
    assert accelerator.scaler.get_growth_interval() == 1000
    assert calls == {"clip": digits.STEPS}
    assert skipped == [step == digits.OVERFLOW for step in range(digits.STEPS)]
    assert scheduled == digits.STEPS - 1
    digits.assert_is_the_loop(network, optimizer)


def test_accumulation(calls: collections.Counter[str]) -> None:
    accelerator = ours.with_scaler(fp16(gradient_accumulation_steps=2))
    assert trained("amp_ext.optim", accelerator)[1] == [False, True, False]
    assert calls == {"clip": digits.STEPS // 2}


def pair(accelerator: Any) -> tuple[list[torch.nn.Parameter], list[Any]]:
    weights = [torch.nn.Parameter(torch.ones(2, device="cuda")) for _ in range(2)]
    return weights, [accelerator.prepare(digits.OPTIMIZERS["fused"]([each])) for each in weights]


def test_each_optimizer_knows_its_own_skip() -> None:
    accelerator = ours.with_scaler(fp16())
    weights, optimizers = pair(accelerator)
    for weight, factor in zip(weights, (torch.inf, 1.0), strict=True):
        accelerator.backward((weight * factor).sum())
    for optimizer, weight in zip(optimizers, weights, strict=True):
        accelerator.clip_grad_norm_([weight], digits.MAX_NORM)
        optimizer.step()
    assert [optimizer.step_was_skipped for optimizer in optimizers] == [True, False]
    assert accelerator.optimizer_step_was_skipped
    assert not pickle.loads(pickle.dumps(optimizers[1])).step_was_skipped


def test_too_many_skips_are_an_error() -> None:
    accelerator = ours.with_scaler(fp16(), max_consecutive_skips=2)
    (weight, _), (optimizer, _) = pair(accelerator)
    for _ in range(2):
        accelerator.backward((weight * torch.inf).sum())
        optimizer.step()
    with pytest.raises(RuntimeError, match="the last 2 steps have been skipped"):
        _ = accelerator.optimizer_step_was_skipped


@pytest.mark.parametrize("clipped", [1, 2])
def test_optimizers_are_clipped_in_turn(clipped: int) -> None:
    """Accelerate updates the scaler after each step, which would lose another optimizer's clip."""
    accelerator = ours.with_scaler(fp16())
    weights, optimizers = pair(accelerator)
    accelerator.backward(sum(weight.sum() for weight in weights))
    accelerator.clip_grad_norm_(weights[:clipped], digits.MAX_NORM)
    with pytest.raises(RuntimeError, match="one optimizer after the other"):
        optimizers[2 - clipped].step()


def test_a_guard_for_bfloat16_in_an_accelerator_of_ones_own() -> None:
    class Own(accelerate.Accelerator):
        def hello(self) -> str:
            return "hello"

    accelerator = ours.with_scaler(Own(mixed_precision="bf16"))
    assert (isinstance(accelerator, Own), accelerator.hello()) == (True, "hello")
    network, skipped, _ = trained("amp_ext.optim", accelerator)
    assert skipped == [step == digits.OVERFLOW for step in range(digits.STEPS)]
    assert accelerator.scaler.get_scale() == 1.0
    assert network.losses[-1] < network.losses[0]
    digits.assert_takes_and_gives_no_scale(accelerator.scaler)


def test_clips_at_every_micro_step() -> None:
    """A clip before the gradients are synchronized is left to Accelerate."""
    own = accelerate.Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    accelerator = ours.with_scaler(own)
    (weight, _), (optimizer, _) = pair(accelerator)
    for _ in range(4):
        with accelerator.accumulate():
            accelerator.backward(weight.sum())
            accelerator.clip_grad_norm_([weight], digits.MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    assert weight.lt(1).all()


@pytest.mark.parametrize(("is_cpu", "expected"), [(False, "one that has p"), (True, "a GPU or ")])
def test_what_it_refuses(is_cpu: bool, expected: str) -> None:
    accelerator = fp16(cpu=is_cpu)
    if not is_cpu:
        accelerator.prepare(digits.OPTIMIZERS["plain"](digits.Network().parameters()))
    scaler = accelerator.scaler
    with pytest.raises(ValueError, match=f"with_scaler: accelerator: expected {expected}"):
        ours.with_scaler(accelerator)
    assert accelerator.scaler is scaler
