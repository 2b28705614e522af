"""Test timm's loss scaler on the digits program."""

import collections
from typing import Any

import pytest
import torch

import amp_ext
import digits_program as digits

pytest.importorskip("timm", reason="needs it, as in make test-trainers")
ours = pytest.importorskip("amp_ext.integrations.timm")
pytestmark = digits.on_cuda


def trained(optimizer: str, scaler: Any, clip_mode: str = "norm") -> digits.Network:
    """Train in the manner of timm's train.py."""
    amp_ext.install()
    network = digits.Network().cuda()
    stepping = digits.OPTIMIZERS[optimizer](network.parameters())
    for step, (images, labels) in enumerate(digits.batches()):
        stepping.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = network(images.cuda(), labels.cuda())
        scaler(loss, stepping, digits.MAX_NORM, clip_mode, network.parameters())
        assert scaler.step_was_skipped == (step == digits.OVERFLOW)
    return network


@digits.every_optimizer
def test_training_is_the_loop(optimizer: str, calls: collections.Counter[str]) -> None:
    scaler = ours.NativeScaler(growth_interval=1000)
    network = trained(optimizer, scaler)
    assert calls == {"clip": digits.STEPS}
    assert scaler._scaler.get_growth_interval() == 1000
    digits.assert_is_the_loop(network, optimizer)


def test_values_are_clipped_by_timm() -> None:
    network = trained("fused", ours.NativeScaler(), clip_mode="value")
    digits.assert_is_the_loop(network, "fused", clip_as="value")


def test_the_norm_of_other_parameters_is_clipped_by_timm() -> None:
    """timm clips the norm of fewer gradients than the optimizer has, as without a head."""
    network = digits.Network().cuda()
    optimizer = digits.OPTIMIZERS["amp_ext.optim"](network.parameters())
    body, head = network.layers[0], network.layers[2]
    loss = network(*(part.cuda() for part in digits.batches()[0]))
    expected = torch.autograd.grad(loss, [body.weight, head.weight], retain_graph=True)
    ours.NativeScaler()(loss, optimizer, digits.MAX_NORM, parameters=body.parameters())
    assert body.weight.grad.norm() < digits.MAX_NORM < expected[0].norm()
    torch.testing.assert_close(head.weight.grad, expected[1])


def test_accumulation_clips_and_steps_at_its_end(calls: collections.Counter[str]) -> None:
    network, scaler = digits.Network().cuda(), ours.NativeScaler()
    optimizer, before = digits.OPTIMIZERS["fused"](network.parameters()), network.values()
    for need_update in (False, True):
        loss = network(*(part.cuda() for part in digits.batches()[0]))
        scaler(loss, optimizer, digits.MAX_NORM, need_update=need_update)
        assert torch.equal(network.values(), before) is not need_update
    assert calls == {"clip": 1}
