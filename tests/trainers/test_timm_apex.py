"""Test timm's ApexScaler (``from apex import amp``) on the digits program."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import amp_ext.compat.apex
from amp_ext.compat.apex import amp
from digits_program import (
    MAX_NORM,
    OPTIMIZERS,
    OVERFLOW,
    STEPS,
    Network,
    assert_learned,
    assert_same,
    batches,
    every_optimizer,
    on_cuda,
    written_out,
)

timm_cuda = pytest.importorskip("timm.utils.cuda", reason="needs timm, as in make test-trainers")


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


@on_cuda
@every_optimizer
def test_training_is_the_loop(device: str, optimizer: str, apex_scaler: Any) -> None:
    network = Network().cuda()
    network, stepping = amp.initialize(
        network, OPTIMIZERS[optimizer](network.parameters()), opt_level="O1", verbosity=0
    )
    for images, labels in batches():
        stepping.zero_grad()
        loss = network(images.cuda(), labels.cuda())
        apex_scaler(loss, stepping, clip_grad=MAX_NORM, parameters=network.parameters())
    assert_learned(network)
    assert_same(network, written_out(optimizer, clip_as="torch"))
    state = apex_scaler.state_dict()
    assert state == {"loss_scaler0": {"loss_scale": 2.0**15, "unskipped": STEPS - OVERFLOW - 1}}
    amp.initialize(Network().cuda(), verbosity=0)
    apex_scaler.load_state_dict(state)
    assert amp.state_dict() == state
