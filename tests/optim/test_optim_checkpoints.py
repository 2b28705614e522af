"""Test checkpoints between torch's optimizers and amp_ext's, and copies and pickles."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from amp_ext import optim
from cases import through_a_file
from executors import Executor, against_oracle
from optim_cases import LR, assert_close, assert_same_bits, bits, make, params, tolerance, train

CASES = ("amsgrad", "adamw", "momentum", "dampening")
halves = partial(make, optim, "adamw", "cpu", torch.bfloat16)


def loaded(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the target, with the weights and the checkpoint of the source."""
    with torch.no_grad():
        for mine, other in zip(params(target), params(source), strict=True):
            mine.copy_(other)
    target.load_state_dict(through_a_file(source.state_dict()))
    return target


@pytest.mark.parametrize("case", CASES)
def test_across(case: str) -> None:
    ours, torchs = make(optim, case), make(torch.optim, case)
    for optimizer in (ours, torchs):
        train(optimizer, range(3))
    from_ours = [loaded(ours, make(module, case)) for module in (optim, torch.optim)]
    from_torch = [loaded(torchs, make(module, case)) for module in (optim, torch.optim)]
    for optimizer in (*from_ours, *from_torch, ours, torchs):
        train(optimizer, range(3, 6))
    assert_same_bits(bits(from_ours[0]), bits(ours))
    assert_same_bits(bits(from_torch[1]), bits(torchs))
    for optimizer in (ours, from_ours[1], from_torch[0]):
        assert_close(params(optimizer), params(torchs), tolerance(6, LR))


@pytest.mark.parametrize("through_torch", [False, True])
def test_masters_from_weights(through_torch: bool) -> None:
    """Loading makes masters from weights if the checkpoint's are missing or stale.

    torch's optimizer does not update masters.
    """
    source = make(torch.optim, "adamw", dtype=torch.bfloat16)
    if through_torch:
        before = halves(master_weights=True)
        train(before, range(1))
        source.load_state_dict(before.state_dict())
    train(source, range(3))
    target = loaded(source, halves(master_weights=True))
    for group in target.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
    train(target, [3])
    for mine, other in zip(params(target), params(source), strict=True):
        assert_same_bits(target.state[mine]["master_param"], other.detach().float())


def test_moments_get_the_dtypes_of_the_optimizer() -> None:
    wide = halves(exp_avg_dtype=torch.float32)
    train(wide, range(1))
    same, narrow = (halves(exp_avg_dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    for optimizer in (same, narrow):
        optimizer.load_state_dict(wide.state_dict())
    first, of_same, of_narrow = (o.state[params(o)[0]]["exp_avg"] for o in (wide, same, narrow))
    assert_same_bits(of_same, first)
    assert_same_bits(of_narrow, first.bfloat16())


MASTERS = {"master_weights": True, "exp_avg_dtype": torch.bfloat16}
COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
    "checkpoint": lambda optimizer: loaded(optimizer, halves(**MASTERS)),
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_go_on_alike(how: str) -> None:
    optimizer = halves(**MASTERS)
    train(optimizer, range(2))
    other = COPIES[how](optimizer)
    for each in (optimizer, other):
        train(each, range(2, 4))
    assert_same_bits(bits(other), bits(optimizer))
    dtypes = {name: value.dtype for name, value in other.state[params(other)[0]].items()}
    assert (dtypes["master_param"], dtypes["exp_avg"]) == (torch.float32, torch.bfloat16)


def test_loading_between_steps_and_hooks() -> None:
    """A user's hook sees tensors, and its result is loaded."""
    source = make(optim, "adamw")
    train(source, range(2))
    saved = copy.deepcopy(source.state_dict())
    train(source, range(2, 4))

    def forget_moments(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        for state in state_dict["state"].values():
            assert isinstance(state["exp_avg"], Tensor)
        return {**state_dict, "state": {}}

    handle = source.register_load_state_dict_pre_hook(forget_moments)
    source.load_state_dict(saved)
    assert not source.state
    handle.remove()
    source.load_state_dict(saved)
    train(source, range(1))
    assert source.state[params(source)[0]]["step"] == 3


def test_hooks_on_the_way_out() -> None:
    """A user's hook sees what is saved, and its result is returned."""
    optimizer = make(optim, "adamw")
    train(optimizer, range(2))
    plain = optimizer.state_dict()
    for prepend in (False, True):
        handle = optimizer.register_state_dict_post_hook(lambda _, saved: {"all": saved}, prepend)
        assert_same_bits(optimizer.state_dict(), {"all": plain})
        handle.remove()
    assert not optimizer._optimizer_state_dict_post_hooks


@against_oracle
@pytest.mark.parametrize("fused", [None, True])
def test_where_steps_are_saved(executor: Executor, fused: bool | None) -> None:
    """Steps are saved on the CPU if torch's optimizer would have them there."""
    optimizer, other = (
        make(module, "adam", executor.device, fused=fused) for module in (optim, torch.optim)
    )
    train(optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    expected = executor.device if fused else torch.device("cpu")
    assert {state["step"].device.type for state in saved["state"].values()} == {expected.type}
    loaded(optimizer, other)
    optimizer.load_state_dict(saved)
    for each in (optimizer, other):
        train(each, range(2, 4))
    assert_close(params(optimizer), params(other), tolerance(4, LR))
    assert optimizer.state[params(optimizer)[0]]["step"] == 4
