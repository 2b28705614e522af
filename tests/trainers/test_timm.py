"""Test timm's loss scalers on the digits program."""

from __future__ import annotations

import collections
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import amp_ext.compat.apex
import digits_program as digits
from amp_ext.compat.apex import amp

timm_cuda = pytest.importorskip("timm.utils.cuda", reason="needs it, as in make test-trainers")
ours = pytest.importorskip("amp_ext.integrations.timm")


class Training:
    """A training in the manner of timm's train.py."""

    def __init__(self, optimizer: str, loss_scaler: Any) -> None:
        self.network = digits.Network().cuda()
        self.optimizer = digits.OPTIMIZERS[optimizer](self.network.parameters())
        self.loss_scaler = loss_scaler
        self.skipped: list[bool] = []

    def steps(self, clip_mode: str = "norm") -> Training:
        for images, labels in digits.batches():
            self.optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = self.network(images.cuda(), labels.cuda())
            self.loss_scaler(
                loss,
                self.optimizer,
                clip_grad=digits.MAX_NORM,
                clip_mode=clip_mode,
                parameters=self.network.parameters(),
            )
            self.skipped.append(self.loss_scaler.step_was_skipped)
        return self


@digits.on_cuda
@digits.every_optimizer
def test_training_is_the_loop(
    device: str, optimizer: str, calls: collections.Counter[str], installed: None
) -> None:
    training = Training(optimizer, ours.NativeScaler(growth_interval=1000)).steps()
    assert calls == {"clip": digits.STEPS}
    assert training.skipped == [step == digits.OVERFLOW for step in range(digits.STEPS)]
    assert training.loss_scaler._scaler.get_growth_interval() == 1000
    assert training.loss_scaler._scaler.get_skipped_steps() == 1
    digits.assert_learned(training.network)
    digits.assert_same(training.network, digits.written_out(optimizer))


@digits.on_cuda
def test_values_are_clipped_by_timm(device: str, installed: None) -> None:
    training = Training("fused", ours.NativeScaler()).steps(clip_mode="value")
    digits.assert_same(training.network, digits.written_out("fused", clip_as="value"))


@digits.on_cuda
def test_the_norm_of_other_parameters_is_clipped_by_timm(device: str, installed: None) -> None:
    """timm clips the norm of other parameters, such as a model's without its head.

    The optimizer has more gradients than timm clips.
    """
    training = Training("amp_ext.optim", ours.NativeScaler())
    body, head = training.network.layers[0], training.network.layers[2]
    loss = training.network(*(part.cuda() for part in digits.batches()[0]))
    expected = torch.autograd.grad(loss, [body.weight, head.weight], retain_graph=True)
    training.loss_scaler(loss, training.optimizer, digits.MAX_NORM, parameters=body.parameters())
    assert body.weight.grad.norm() < digits.MAX_NORM < expected[0].norm()
    torch.testing.assert_close(head.weight.grad, expected[1])


@digits.on_cuda
def test_accumulation_clips_and_steps_at_its_end(
    device: str, calls: collections.Counter[str]
) -> None:
    training = Training("fused", ours.NativeScaler())
    before = training.network.values()
    for need_update in (False, True):
        loss = training.network(*(part.cuda() for part in digits.batches()[0]))
        training.loss_scaler(loss, training.optimizer, digits.MAX_NORM, need_update=need_update)
        assert torch.equal(training.network.values(), before) is not need_update
    assert calls == {"clip": 1}


# ---- ApexScaler, by ``from apex import amp`` -----------------------------------------------------


@pytest.fixture
def apex_scaler() -> Iterator[Any]:
    """Return the scaler of a timm imported after ``install()``."""
    assert "apex" not in sys.modules
    amp_ext.compat.apex.install()
    importlib.reload(timm_cuda)
    assert timm_cuda.has_apex
    yield timm_cuda.ApexScaler()
    del sys.modules["apex"], sys.modules["apex.amp"]
    importlib.reload(timm_cuda)


@digits.on_cuda
@digits.every_optimizer
def test_training_with_apex_is_the_loop(device: str, optimizer: str, apex_scaler: Any) -> None:
    network = digits.Network().cuda()
    network, stepping = amp.initialize(
        network, digits.OPTIMIZERS[optimizer](network.parameters()), opt_level="O1", verbosity=0
    )
    for images, labels in digits.batches():
        stepping.zero_grad()
        loss = network(images.cuda(), labels.cuda())
        apex_scaler(loss, stepping, clip_grad=digits.MAX_NORM, parameters=network.parameters())
    digits.assert_learned(network)
    digits.assert_same(network, digits.written_out(optimizer, clip_as="torch"))
