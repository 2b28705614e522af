"""Test that install(scaler=True) gives programs amp_ext's scaler until uninstall()."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.amp import GradScaler  # as a library does, long before install()
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import amp_ext
from programs import output

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore:torch.cuda.amp.GradScaler is enabled"
)


@pytest.fixture(autouse=True)
def uninstalled() -> Iterator[None]:
    init = torch.amp.GradScaler.__init__
    yield
    amp_ext.uninstall()
    assert torch.amp.GradScaler.__init__ is init


LOOKUPS: dict[str, Callable[[], torch.amp.GradScaler]] = {
    "torch.amp": lambda: torch.amp.GradScaler(device="cpu", init_scale=8.0),
    "imported before": lambda: GradScaler("cpu", init_scale=8.0),
    "torch.cuda.amp": lambda: torch.cuda.amp.GradScaler(8.0),
    "torch.cpu.amp": lambda: torch.cpu.amp.GradScaler(8.0),
}


@pytest.mark.parametrize("make", LOOKUPS.values(), ids=LOOKUPS)
def test_every_way_to_make_one(make: Callable[[], torch.amp.GradScaler]) -> None:
    """New scalers are amp_ext's and instances of torch's class, under any name of it."""
    before = make()
    torchs = type(before)
    amp_ext.install()
    assert type(make()) is torchs
    amp_ext.install(scaler=True)
    assert torch.amp.GradScaler("cpu", hysteresis=2)._hysteresis == 2
    ours = make()
    for _ in range(2):
        assert isinstance(ours, amp_ext.GradScaler)
        assert isinstance(ours, torchs)
        assert type(before) is torchs
        assert ours.state_dict() == before.state_dict()
        amp_ext.uninstall()
    assert type(make()) is torchs


def test_install_and_uninstall_can_be_repeated() -> None:
    """Scalers are amp_ext's until uninstall(); install() without scaler=True takes nothing back."""
    made = []
    for change in (
        *(amp_ext.uninstall, functools.partial(amp_ext.install, scaler=True)),
        *(functools.partial(amp_ext.install, scaler=True), amp_ext.install),
        *(amp_ext.uninstall, amp_ext.uninstall, amp_ext.install),
        *(functools.partial(amp_ext.install, scaler=True), amp_ext.uninstall),
    ):
        change()
        made.append(isinstance(torch.amp.GradScaler("cpu"), amp_ext.GradScaler))
    assert made == [False, True, True, True, False, False, False, True, False]


def test_subclasses_stay_as_they_are() -> None:
    """Scalers of subclasses are what they were."""

    class Own(torch.amp.GradScaler):
        pass

    amp_ext.install(scaler=True)
    assert type(Own("cpu")) is Own
    assert type(ShardedGradScaler("cpu")) is ShardedGradScaler
    assert type(amp_ext.GradScaler("cpu")) is amp_ext.GradScaler


def test_copies_and_pickles_of_torchs_scaler_stay_torchs() -> None:
    """A scaler that was torch's before install() has copies of torch's."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    text = pickle.dumps(scaler)
    amp_ext.install(scaler=True)
    for again in (pickle.loads(text), copy.copy(scaler), copy.deepcopy(scaler)):
        assert type(again) is torch.amp.GradScaler
        assert again.get_scale() == 8.0


LOAD = """
import pickle, sys
scaler = pickle.loads(bytes.fromhex(sys.argv[1]))
import torch
print(type(scaler).__module__, scaler.get_scale(), type(torch.amp.GradScaler("cpu")).__module__)
"""


def test_pickles_made_while_installed_load_everywhere() -> None:
    amp_ext.install(scaler=True)
    text = pickle.dumps(torch.amp.GradScaler("cpu", init_scale=8.0))
    amp_ext.uninstall()
    assert pickle.loads(text).get_scale() == 8.0
    printed = output(LOAD, text.hex()).split()
    assert printed == ["amp_ext.scaler.grad_scaler", "8.0", "torch.amp.grad_scaler"]


@pytest.mark.parametrize("keeps", [True, False], ids=["wraps ours", "replaces ours"])
def test_what_somebody_has_put_in_its_place_stays(
    monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    calls = []
    torchs = torch.amp.GradScaler.__init__
    amp_ext.install(scaler=True)
    inner = torch.amp.GradScaler.__init__ if keeps else torchs

    @functools.wraps(inner)
    def theirs(self: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(type(self))
        inner(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.amp.GradScaler, "__init__", theirs)
        patch.setattr(torch.amp, "GradScaler", torch.amp.GradScaler)
        assert isinstance(torch.amp.GradScaler("cpu"), amp_ext.GradScaler) == keeps
        amp_ext.uninstall()
        assert torch.amp.GradScaler.__init__ is theirs
        assert type(torch.amp.GradScaler("cpu")) is torch.amp.GradScaler
        amp_ext.install(scaler=True)
        assert isinstance(torch.amp.GradScaler("cpu"), amp_ext.GradScaler)
        amp_ext.uninstall()
        assert torch.amp.GradScaler.__init__ is theirs
    assert len(calls) >= 3
    torch.amp.GradScaler.__init__ = torchs  # another patch restores the original it saved
