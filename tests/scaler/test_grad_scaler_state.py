"""Test GradScaler's state: checkpoints to and from torch's class, pickles, copies."""

import copy
import json
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cases import through_a_file
from twins import OURS, THEIRS, ScalerClass, finish, leaf, plain, sgd, started


def trained(scaler_class: ScalerClass, **options: Any) -> Any:
    """Return a scaler after one good step and two overflows, the last ones in a row."""
    scaler = started(scaler_class, 64.0, growth_factor=3.0, growth_interval=5, **options)
    for value in (1.0, math.inf, math.nan, 1.0):
        finish(scaler, sgd(leaf(value)))
    return scaler


def test_state_dict_is_torchs_and_counters_in_one_key_more() -> None:
    """The state is torch's until there is something to count, and survives a safe torch.load."""
    for start in (lambda cls: cls("cpu"), started):
        assert list(start(OURS).state_dict().items()) == list(start(THEIRS).state_dict().items())
    ours, theirs = trained(OURS).state_dict(), trained(THEIRS).state_dict()
    assert list(ours) == [*theirs, "amp_ext"]
    assert through_a_file(ours) == ours
    assert json.loads(json.dumps(ours)) == ours


def test_loading_torchs_state_starts_the_counters_anew() -> None:
    """Counters and hysteresis start anew with a state of torch's."""
    scaler = trained(OURS, hysteresis=2)
    scaler.load_state_dict(trained(THEIRS).state_dict())
    assert scaler.state_dict() == trained(THEIRS).state_dict()


def test_counters_are_part_of_the_state() -> None:
    """A tracker that was saved for another hysteresis is not loaded."""
    scaler = trained(OURS, hysteresis=4)
    finish(scaler, sgd(leaf(math.inf)))  # one of the four overflows of a backoff
    assert (scaler._counters(), scaler.get_scale()) == ((3, 3), 64.0)
    for hysteresis, tracker in ((4, 3), (5, 5), (2, 2)):
        for loaded in (OURS("cpu", hysteresis=hysteresis), started(OURS, hysteresis=hysteresis)):
            loaded.load_state_dict(scaler.state_dict())
            loaded.scale(torch.ones(()))
            assert loaded._counters() == (3, tracker)
            assert (loaded.state_dict() == scaler.state_dict()) == (hysteresis == 4)


@pytest.mark.parametrize("duplicate", [lambda s: pickle.loads(pickle.dumps(s)), copy.deepcopy])
def test_duplicates_keep_options_and_counters(duplicate: Callable[[Any], Any]) -> None:
    options = {"hysteresis": 3, "min_scale": 2.0, "max_scale": 128.0, "allow_no_grads": True}
    scaler = trained(OURS, **options)
    again = duplicate(scaler)
    assert again.state_dict() == scaler.state_dict()
    assert again.get_skipped_steps() == 2
    for name in ("_hysteresis", "_min_scale", "_max_scale", "_allow_no_grads"):
        assert getattr(again, name) == getattr(scaler, name)


FAKE = FakeTensorMode().from_tensor(torch.ones(()))
BAD_ENTRIES = [
    ("scale", -1e39),
    *(("scale", value) for value in (1e39, 10**400, "1.0", 1j, torch.ones(2), torch.ones(2, 1))),
    *(("growth_factor", value) for value in (None, FAKE, torch.ones((), device="meta"))),
    *(("growth_interval", value) for value in (2**63, -(2**63) - 1, 1.5, math.nan)),
    *(("_growth_tracker", value) for value in (2**31, -(2**31) - 1, torch.tensor(0.5))),
    *(("amp_ext", {"skipped_steps": value}) for value in (-1, 2**63)),
    ("amp_ext", {"hysteresis": 0}),
    ("amp_ext", {"hysteresis": 2, "hysteresis_tracker": -(2**40)}),
]


def test_a_bad_state_changes_nothing() -> None:
    """A state with an entry that nothing could use is an error."""
    scaler = trained(OURS, hysteresis=2)
    before = {name: plain(value) for name, value in vars(scaler).items()}
    for key, value in BAD_ENTRIES:
        state = OURS("cpu", 7.0, 5.0, 0.1, 9).state_dict() | {key: value}
        name = next(reversed(value)) if isinstance(value, dict) else key
        with pytest.raises((TypeError, ValueError), match=f"load_state_dict: '{name}' must"):
            scaler.load_state_dict(state)
    assert {name: plain(value) for name, value in vars(scaler).items()} == before


VALUES: dict[str, tuple[Any, ...]] = {
    "scale": (
        *(-0.0, -3.5, 2.0**-149, 0.1, torch.finfo(torch.float32).max, 1, True),
        *(math.inf, -math.inf, math.nan, torch.tensor(0.1).double()),
    ),
    "growth_factor": (0.3, -2.0, math.inf, 1e300, np.float32(2), torch.tensor(1.5)),
    "backoff_factor": (math.nan, 5e-324, 1),
    "growth_interval": (0, 2**63 - 1, -(2**63), 7.0),
    "_growth_tracker": (2**31 - 1, -(2**31), 7.0, torch.tensor(3, dtype=torch.int32)),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("key", VALUES)
def test_whatever_torch_can_hold_loads_bit_for_bit(key: str) -> None:
    def loaded(scaler_class: ScalerClass, value: Any) -> Any:
        scaler = trained(scaler_class)
        scaler.load_state_dict(THEIRS("cpu", 7.0, 5.0, 0.1, 9).state_dict() | {key: value})
        return [float(number).hex() for number in scaler.state_dict().values()]

    for value in VALUES[key]:
        assert loaded(OURS, value) == loaded(THEIRS, value)
