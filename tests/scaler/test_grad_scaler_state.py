"""Test GradScaler's state: checkpoints to and from torch's class, pickles, copies."""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner

from twins import (
    OURS,
    THEIRS,
    ScalerClass,
    leaf,
    plain,
    raises_as_torch,
    same_outcome,
    sgd,
    started,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
TORCH_KEYS = ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"]


def trained(scaler_class: ScalerClass, **options: Any) -> Any:
    """Return a scaler after one good step and two overflows, the last ones in a row."""
    scaler = started(scaler_class, 64.0, growth_factor=3.0, growth_interval=5, **options)
    for value in (1.0, math.inf, math.nan, 1.0):
        scaler.step(sgd(leaf(value)))
        scaler.update()
    return scaler


def torch_part(state: dict[str, Any]) -> dict[str, Any]:
    return {key: state[key] for key in TORCH_KEYS}


def test_state_dict_is_torchs_while_there_is_nothing_to_count() -> None:
    def state(scaler_class: ScalerClass) -> Any:
        return list(scaler_class("cpu").state_dict()), started(scaler_class).state_dict()

    assert state(OURS) == state(THEIRS)
    assert list(OURS("cpu", hysteresis=2).state_dict()) == TORCH_KEYS


def test_state_dict_is_torchs_and_one_key_more() -> None:
    ours, theirs = trained(OURS).state_dict(), trained(THEIRS).state_dict()
    assert list(theirs) == TORCH_KEYS
    assert list(ours) == [*TORCH_KEYS, "amp_ext"]
    assert torch_part(ours) == theirs
    assert [type(ours[key]) for key in TORCH_KEYS] == [type(theirs[key]) for key in TORCH_KEYS]


def test_state_dict_is_plain_data() -> None:
    """The state dict survives JSON, and torch.load without permission to run code."""
    state = trained(OURS, hysteresis=2).state_dict()
    assert json.loads(json.dumps(state)) == state
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == state


@pytest.mark.parametrize("into_started", [False, True], ids=["lazy", "started"])
def test_counters_are_part_of_the_state(into_started: bool) -> None:
    scaler = trained(OURS, hysteresis=4)
    scaler.step(sgd(leaf(math.inf)))
    scaler.update()
    assert (scaler.get_skipped_steps(), scaler.get_scale()) == (3, 64.0)

    loaded = started(OURS, hysteresis=4) if into_started else OURS("cpu", hysteresis=4)
    loaded.load_state_dict(scaler.state_dict())
    assert loaded.state_dict() == scaler.state_dict()
    for expected in (64.0, 64.0, 32.0):  # one of the four overflows has been tolerated already
        loaded.scale(torch.ones(()))
        loaded.step(sgd(leaf(math.inf)))
        loaded.update()
        assert loaded.get_scale() == expected
    assert loaded.get_skipped_steps() == 6


def test_loading_torchs_state_starts_the_counters_anew() -> None:
    scaler = trained(OURS, hysteresis=2)
    scaler.load_state_dict(trained(THEIRS).state_dict())
    assert scaler.get_skipped_steps() == 0
    assert scaler._counters()[1] == 2
    assert scaler.state_dict() == trained(THEIRS).state_dict()


def test_distributed_checkpoint_without_the_counters_that_it_is_asked_for(tmp_path: Path) -> None:
    """Missing counters in a distributed checkpoint are an error; a partial load keeps them."""
    dcp.save({"scaler": trained(THEIRS).state_dict()}, checkpoint_id=tmp_path)
    loaded = trained(OURS)
    template = {"scaler": loaded.state_dict()}
    with pytest.raises(CheckpointException, match=r"Missing key .*amp_ext\.skipped_steps"):
        dcp.load(template, checkpoint_id=tmp_path)
    dcp.load(template, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(allow_partial_load=True))
    loaded.load_state_dict(template["scaler"])
    assert (loaded.get_scale(), loaded.get_skipped_steps()) == (16.0, 2)


@pytest.mark.parametrize("duplicate", [lambda s: pickle.loads(pickle.dumps(s)), copy.deepcopy])
def test_duplicates_keep_options_and_counters(duplicate: Callable[[Any], Any]) -> None:
    options = {"hysteresis": 3, "min_scale": 2.0, "max_scale": 128.0, "allow_no_grads": True}
    scaler = trained(OURS, **options)
    again = duplicate(scaler)
    assert again.state_dict() == scaler.state_dict()
    assert again.get_skipped_steps() == 2
    for name in ("_hysteresis", "_min_scale", "_max_scale", "_allow_no_grads"):
        assert getattr(again, name) == getattr(scaler, name)


def test_pickle_of_a_disabled_scaler() -> None:
    scaler = pickle.loads(pickle.dumps(OURS("cpu", enabled=False)))
    assert not scaler.is_enabled()
    assert (scaler.state_dict(), scaler.get_scale(), scaler.get_skipped_steps()) == ({}, 1.0, 0)


def test_empty_state_dict() -> None:
    raises_as_torch(
        lambda scaler: scaler("cpu").load_state_dict({}),
        RuntimeError,
        "The source state dict is empty, possibly because it was saved from a disabled instance",
    )


@pytest.mark.parametrize("missing", TORCH_KEYS)
def test_foreign_state_dict_changes_nothing(missing: str) -> None:
    state = OURS("cpu", 7.0, 5.0, 0.1, 9).state_dict()
    del state[missing]
    raises_as_torch(lambda scaler: trained(scaler).load_state_dict(state), KeyError, missing)
    scaler = trained(OURS)
    before = scaler.state_dict()
    with pytest.raises(KeyError):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before


HUGE = 10**400
FAKE = FakeTensorMode().from_tensor(torch.ones(()))
BAD_ENTRIES = {
    "scale": (1e39, -3.4028235e38, HUGE, None, "1.0", 1j, [], {}, torch.ones(2), torch.ones(2, 1)),
    "growth_factor": (HUGE, None, "2", torch.ones(0), torch.ones((), device="meta")),
    "backoff_factor": (-HUGE, None, b"1", torch.ones((), dtype=torch.complex64)),
    "growth_interval": (2**63, 1.5, math.inf, math.nan, HUGE, None, "2", [], torch.ones(2)),
    "_growth_tracker": (2**31, -(2**31) - 1, 0.5, -math.inf, HUGE, None, torch.tensor(0.5), FAKE),
    "amp_ext": (
        *("words", None, 3, [1, 2]),
        *({"skipped_steps": value} for value in ("many", None, -1, 2**63, math.inf, 0.5)),
        *({"hysteresis": value} for value in (0, 2**31, "2", math.nan)),
        *({"hysteresis": 2, "hysteresis_tracker": value} for value in (-(2**40), HUGE, None, [])),
    ),
}


def everything_of(scaler: Any) -> dict[str, Any]:
    """Its attributes, tensors by their values and identity."""
    return {
        name: (id(value), plain(value)) if isinstance(value, torch.Tensor) else value
        for name, value in vars(scaler).items()
    }


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "started"])
@pytest.mark.parametrize("key", BAD_ENTRIES)
def test_entry_that_nothing_could_use_changes_nothing(key: str, lazy: bool) -> None:
    scaler = OURS("cpu", hysteresis=2) if lazy else trained(OURS, hysteresis=2)
    before = everything_of(scaler)
    for value in BAD_ENTRIES[key]:
        state = OURS("cpu", 7.0, 5.0, 0.1, 9).state_dict() | {key: value}
        name = next(reversed(value)) if key == "amp_ext" and isinstance(value, dict) else key
        with pytest.raises((TypeError, ValueError), match=f"load_state_dict: '{name}' must"):
            scaler.load_state_dict(state)
        assert everything_of(scaler) == before


@pytest.mark.parametrize("state", [None, [], "words", 3, [("scale", 1.0)]], ids=repr)
def test_what_is_no_state_dict(state: Any) -> None:
    scaler = trained(OURS)
    before = everything_of(scaler)
    with pytest.raises(TypeError, match="load_state_dict: expected a dict, got"):
        scaler.load_state_dict(state)
    assert everything_of(scaler) == before


@pytest.mark.parametrize(
    ("key", "values"),
    {
        "scale": (
            *(0.0, -0.0, -3.5, 2.0**-149, 0.1, torch.finfo(torch.float32).max, 1, True),
            *(math.inf, -math.inf, math.nan, torch.tensor(3.0), torch.tensor(0.1).double()),
        ),
        "growth_factor": (1.0, 0.3, -2.0, math.inf, 1e300, np.float32(2), torch.tensor(1.5)),
        "backoff_factor": (1.0, 0.3, 0.0, -1.0, -math.inf, math.nan, 5e-324, 1),
        "growth_interval": (0, -1, 1, 2**63 - 1, -(2**63), 7.0),
        "_growth_tracker": (0, -1, 2**31 - 1, -(2**31), 7.0, torch.tensor(3, dtype=torch.int32)),
    }.items(),
)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "started"])
def test_whatever_torch_can_hold_loads_bit_for_bit(
    key: str, values: tuple[Any, ...], lazy: bool
) -> None:
    def loaded(scaler_class: ScalerClass, value: Any) -> Any:
        scaler = scaler_class("cpu") if lazy else trained(scaler_class)
        scaler.load_state_dict(THEIRS("cpu", 7.0, 5.0, 0.1, 9).state_dict() | {key: value})
        scaler.scale(torch.ones(()))
        return [float(number).hex() for number in torch_part(scaler.state_dict()).values()]

    for value in values:
        assert loaded(OURS, value) == loaded(THEIRS, value)


@pytest.mark.parametrize("state", [{}, {"amp_ext": "words"}, {"a": 1}, None], ids=repr)
def test_disabled_scaler_loads_anything(state: Any) -> None:
    def script(scaler_class: ScalerClass) -> Any:
        return scaler_class("cpu", enabled=False).load_state_dict(state)

    assert same_outcome(script) == ("returned", None)
