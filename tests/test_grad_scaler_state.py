"""GradScaler's state: checkpoints to and from torch's class, pickles, copies."""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
from typing import Any

import pytest
import torch

from twins import OURS, THEIRS, ScalerClass, leaf, raises_as_torch, same_outcome, sgd, started

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


def test_state_dict_is_torchs_and_one_key_more() -> None:
    ours, theirs = trained(OURS).state_dict(), trained(THEIRS).state_dict()
    assert list(theirs) == TORCH_KEYS
    assert list(ours) == [*TORCH_KEYS, "amp_ext"]
    assert torch_part(ours) == theirs
    assert [type(ours[key]) for key in TORCH_KEYS] == [type(theirs[key]) for key in TORCH_KEYS]


def test_state_dict_is_plain_data() -> None:
    """It survives JSON, and torch.load without permission to run code."""
    state = trained(OURS, hysteresis=2).state_dict()
    assert json.loads(json.dumps(state)) == state
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == state


@pytest.mark.parametrize("into_started", [False, True], ids=["lazy", "started"])
@pytest.mark.parametrize("to_class", [OURS, THEIRS], ids=["to-amp_ext", "to-torch"])
@pytest.mark.parametrize("from_class", [OURS, THEIRS], ids=["from-amp_ext", "from-torch"])
def test_checkpoints_go_both_ways(
    from_class: ScalerClass, to_class: ScalerClass, into_started: bool
) -> None:
    state = trained(from_class).state_dict()
    scaler = started(to_class) if into_started else to_class("cpu")
    scaler.load_state_dict(state)
    assert torch_part(scaler.state_dict()) == torch_part(state)
    assert scaler.get_scale() == 16.0
    scaled = scaler.scale(torch.ones(()))
    assert scaled.item() == 16.0
    assert torch_part(scaler.state_dict()) == torch_part(state)


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
    assert scaler.state_dict() == OURS("cpu", hysteresis=2).state_dict() | torch_part(
        scaler.state_dict()
    )


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "started"])
@pytest.mark.parametrize(
    "duplicate", [lambda s: pickle.loads(pickle.dumps(s)), copy.deepcopy], ids=["pickle", "copy"]
)
def test_pickle_and_deepcopy(duplicate: Any, lazy: bool) -> None:
    def script(scaler_class: ScalerClass) -> Any:
        scaler = scaler_class("cpu", 3.0, 4.0, 0.5, 2) if lazy else trained(scaler_class)
        again = duplicate(scaler)
        assert type(again) is scaler_class
        before = torch_part(scaler.state_dict()), torch_part(again.state_dict())
        again.scale(torch.ones(()))
        again.step(sgd(leaf(math.inf)))
        again.update()
        return before, torch_part(scaler.state_dict()), torch_part(again.state_dict())

    assert same_outcome(script)[0] == "returned"


def test_pickle_keeps_options_and_counters() -> None:
    options = {"hysteresis": 3, "min_scale": 2.0, "max_scale": 128.0, "allow_no_grads": True}
    scaler = trained(OURS, **options)
    again = pickle.loads(pickle.dumps(scaler))
    assert again.state_dict() == scaler.state_dict()
    assert again.get_skipped_steps() == 2
    for name in ("_hysteresis", "_min_scale", "_max_scale", "_allow_no_grads"):
        assert getattr(again, name) == getattr(scaler, name)


def test_pickle_of_a_disabled_scaler() -> None:
    scaler = pickle.loads(pickle.dumps(OURS("cpu", enabled=False)))
    assert not scaler.is_enabled()
    assert (scaler.state_dict(), scaler.get_scale(), scaler.get_skipped_steps()) == ({}, 1.0, 0)


def test_no_pickle_within_a_step() -> None:
    def script(scaler_class: ScalerClass) -> Any:
        scaler = started(scaler_class)
        scaler.unscale_(sgd(leaf(1.0)))
        return pickle.dumps(scaler)

    raises_as_torch(script, AssertionError, "may only be pickled at the beginning of an iteration")


def test_empty_state_dict() -> None:
    raises_as_torch(
        lambda scaler: scaler("cpu").load_state_dict({}),
        RuntimeError,
        "The source state dict is empty, possibly because it was saved from a disabled instance",
    )


@pytest.mark.parametrize("missing", TORCH_KEYS)
@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "started"])
def test_foreign_state_dict_changes_nothing(missing: str, lazy: bool) -> None:
    def load(scaler: Any) -> None:
        state = OURS("cpu", 7.0, 5.0, 0.1, 9).state_dict()
        del state[missing]
        scaler.load_state_dict(state)

    def script(scaler_class: ScalerClass) -> Any:
        return load(scaler_class("cpu") if lazy else trained(scaler_class))

    raises_as_torch(script, KeyError, missing)
    scaler = OURS("cpu") if lazy else trained(OURS)
    before = scaler.state_dict()
    with pytest.raises(KeyError):
        load(scaler)
    assert scaler.state_dict() == before


@pytest.mark.parametrize("own", ["words", {"skipped_steps": "many"}, [1, 2]], ids=repr)
def test_foreign_entry_under_our_key_changes_nothing(own: Any) -> None:
    """What is no state of this class is refused before anything is loaded."""
    scaler = trained(OURS)
    before = scaler.state_dict()
    with pytest.raises((TypeError, ValueError)):
        scaler.load_state_dict(OURS("cpu", 7.0).state_dict() | {"amp_ext": own})
    assert scaler.state_dict() == before


@pytest.mark.parametrize("state", [{}, {"amp_ext": "words"}, {"a": 1}, None], ids=repr)
def test_disabled_scaler_loads_anything(state: Any) -> None:
    def script(scaler_class: ScalerClass) -> Any:
        return scaler_class("cpu", enabled=False).load_state_dict(state)

    assert same_outcome(script) == ("returned", None)
