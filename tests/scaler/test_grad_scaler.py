"""Test that GradScaler is torch's by errors and attributes, and takes unusual gradients."""

import inspect
import math
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

import amp_ext
import twins
from cases import unwritten
from twins import OURS, ScalerClass, grads, leaf, same_outcome, sgd, sparse_leaf, started

# test_grad_scaler_machine.py has the errors of an order of calls.
ERRORS: dict[str, Callable[[ScalerClass], Any]] = {
    "check without scale": lambda s: s("cpu")._check_inf_per_device(sgd(leaf(1.0))),
    "closure by keyword": lambda s: started(s).step(sgd(leaf(1.0)), closure=lambda: 0.0),
    "no parameters": lambda s: started(s).unscale_(type("Any", (), {"param_groups": [{}]})()),
    "second initialisation": lambda s: started(s)._lazy_init_scale_growth_tracker("cpu"),
    "empty state": lambda s: s("cpu").load_state_dict({}),
    "part of a state": lambda s: s("cpu").load_state_dict({"scale": 1.0}),
}


@pytest.mark.parametrize("script", ERRORS.values(), ids=ERRORS)
def test_raises_as_torch(script: Callable[[ScalerClass], Any]) -> None:
    """Errors have torch's types and texts."""
    assert same_outcome(script)[0] == "raised"


@pytest.mark.parametrize("last", [32.0, 64000.0])
def test_fp16_sparse_gradients_overflow_when_coalesced(last: float) -> None:
    """Coalesced float16 gradients overflow, and replace the old gradient.

    Each 64000 fits, and their sum does not.
    """

    def script(scaler_class: ScalerClass) -> Any:
        optimizer = sgd(sparse_leaf(torch.float16, (1.0, 64000.0, last)))
        found_inf = started(scaler_class)._unscale_grads_(
            optimizer, torch.tensor([0.25]), torch.tensor([0.0]), True
        )
        return found_inf, grads(optimizer)

    _, (found_inf, _) = same_outcome(script)
    assert found_inf == {torch.device("cpu"): twins.plain(torch.tensor([float(last > 32)]))}


def test_disabled_scaler_does_nothing() -> None:
    def script(scaler_class: ScalerClass) -> Any:
        scaler = pickle.loads(pickle.dumps(scaler_class("cpu", enabled=False)))
        optimizer, loss = sgd(leaf([4.0, math.inf])), torch.tensor(3.0)
        seen = [scaler.scale(loss) is loss, scaler.scale([loss]) == [loss]]
        steps = scaler.step(optimizer, lambda: 7.0), scaler.step(optimizer, closure=lambda: 8.0)
        seen += [scaler.unscale_(optimizer), *steps, scaler.update()]
        seen += [scaler.get_scale(), scaler._get_growth_tracker(), scaler.is_enabled()]
        seen += [scaler.load_state_dict(state) for state in ({}, {"amp_ext": "words"}, None)]
        if scaler_class is OURS:
            assert str(scaler.overflow_report()) == "No overflow."
            assert scaler.get_skipped_steps() == 0
        return seen, scaler.state_dict(), grads(optimizer)

    assert same_outcome(script)[0] == "returned"


def test_is_torchs_class_by_name_arguments_and_attributes() -> None:
    assert OURS.__name__ == OURS.__qualname__ == "GradScaler"
    assert issubclass(OURS, twins.THEIRS)
    ours, theirs = (inspect.signature(c).parameters for c in (OURS, twins.THEIRS))
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert (ours[name].default, ours[name].kind) == (parameter.default, parameter.kind)
    assert all(p.kind is p.KEYWORD_ONLY for p in list(ours.values())[len(theirs) :])
    for lazy in (False, True):
        scalers = [started(c) if lazy else c("cpu") for c in (OURS, twins.THEIRS)]
        assert vars(scalers[0]).keys() >= vars(scalers[1]).keys()


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")], ids=repr)
def test_internals_that_trainers_use(device: str | torch.device) -> None:
    def script(scaler_class: ScalerClass) -> Any:
        scaler, optimizer = scaler_class("cpu", init_scale=4.0), sgd(leaf([2.0, 6.0]))
        scaler._lazy_init_scale_growth_tracker(device)
        seen = [scaler._scale, scaler._growth_tracker, scaler._get_scale_async() is scaler._scale]
        seen += [scaler._check_inf_per_device(optimizer), grads(optimizer)]
        seen += [scaler._found_inf_per_device(optimizer), dict(scaler._per_optimizer_states[1])]
        scaler._per_optimizer_states = {id(optimizer): scaler._per_optimizer_states[id(optimizer)]}
        scaler.unscale_(optimizer)
        stage = scaler._per_optimizer_states[id(optimizer)]["stage"]
        return seen, stage is OptState.UNSCALED, grads(optimizer)

    assert same_outcome(script)[0] == "returned"


# ---- unusual gradients -----------------------------------------------------------------------


@pytest.mark.parametrize("call", ["unscale_", "step", "fused step"])
def test_flags_of_an_overridden_unscale_grads_count(call: str) -> None:
    """Flags of an overridden _unscale_grads_ count, as of a trainer's reduction over ranks."""

    def overflow(scaler: Any, *args: Any) -> Any:
        found = OURS._unscale_grads_(scaler, *args)
        return {device: torch.ones_like(flag) for device, flag in found.items()}

    scaler = started(type("GradScaler", (OURS,), {"_unscale_grads_": overflow}))
    optimizer = torch.optim.Adam([leaf([4.0, 2.0])], fused=call == "fused step")
    getattr(scaler, call.removeprefix("fused "))(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert optimizer.param_groups[0]["params"][0].tolist() == [1.0, 1.0]


def test_gradients_of_a_transform() -> None:
    """Gradients without storage, as in torch.func's transforms, take torch's way.

    An empty tensor does not show the missing storage.
    """

    def check(grad: Tensor) -> None:
        params = [torch.ones(0), torch.ones(3)]
        params[0].grad, params[1].grad = grad[:0], grad
        started(OURS).step(amp_ext.optim.SGD(params))

    with pytest.raises(NotImplementedError, match="storage"):
        torch.func.vmap(check)(torch.ones(2, 3))


def test_an_overflow_of_a_subclass_skips_the_step() -> None:
    """An infinite gradient is found also if torch unscales it, since it is a tensor subclass."""
    param = torch.ones(2)
    param.grad = twins.Wrapped(torch.tensor([4.0, math.inf]))
    scaler = started(OURS)
    scaler.step(sgd(param))
    scaler.update()
    assert (param.tolist(), scaler.get_scale()) == ([1.0, 1.0], 2.0)


def test_view_with_holes_in_a_graph() -> None:
    """A gradient of create_graph may be a view, and is not a leaf."""
    param = torch.ones(4, 2)
    param.grad = (torch.ones(4, 4, requires_grad=True) * 8)[:, :2]
    started(OURS).unscale_(sgd(param))
    assert param.grad.tolist() == [[2.0, 2.0]] * 4
    assert param.grad.requires_grad


def test_parameters_that_nobody_else_holds() -> None:
    class Parameters:
        def __iter__(self) -> Iterator[Tensor]:
            return (leaf([4.0, 8.0]) for _ in range(100))

    optimizer, scaler = sgd(torch.ones(2)), started(OURS)
    optimizer.param_groups[0]["params"] = Parameters()
    scaler.unscale_(optimizer)
    assert list(scaler._found_inf_per_device(optimizer).values()) == [0.0]


# ---- gradients that cannot be unscaled -----------------------------------------------------------


def csr_leaf() -> Tensor:
    param = torch.eye(2).to_sparse_csr().requires_grad_()
    param.grad = torch.eye(2).to_sparse_csr()
    return param


GOOD = [4.0, 8.0]
BAD: dict[str, tuple[Callable[[], Tensor], type[Exception], str]] = {
    "fp16": (
        lambda: leaf(GOOD, torch.float16),
        ValueError,
        r"^Attempting to unscale FP16 gradients\. .* FP32 weights under autocast, .*"
        " master_weights=True, .* allow_fp16_grads=True$",
    ),
    "sparse int": (lambda: sparse_leaf(torch.int32), NotImplementedError, "for 'Int'"),
    "meta": (lambda: leaf(GOOD, device="meta"), Exception, "meta"),
    "csr": (csr_leaf, NotImplementedError, "must be (a )?strided"),
    "not a tensor": (lambda: 3, AssertionError, "expected param to be torch.Tensor, got int"),
}


def optimizer_of(good: list[Tensor], bad: Any) -> Optimizer:
    """Return an optimizer of two groups, whether it would take the bad parameter or not."""
    optimizer = sgd(*good)
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [bad]})
    return optimizer


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize(("make", "error", "text"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_one_bad_gradient_stops_all(
    call: str, make: Callable[[], Tensor], error: type[Exception], text: str
) -> None:
    """No gradient is scaled and no state advances, wherever in the list the bad one stands."""
    good = [leaf(GOOD, dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)]
    good.append(sparse_leaf(torch.float32))
    written = [*(param.grad for param in good[:3]), good[3].grad._values()]
    scaler = started(OURS)
    optimizer = optimizer_of(good, make())
    bad_group = optimizer.param_groups[1]
    for _ in range(2):
        with unwritten(written), pytest.raises(error) as raised:
            getattr(scaler, call)(optimizer)
        assert re.search(text, str(raised.value))
        assert scaler._per_optimizer_states[id(optimizer)] == {
            "stage": OptState.READY,
            "found_inf_per_device": {},
        }
        optimizer.param_groups.reverse()

    optimizer.param_groups.remove(bad_group)
    scaler.unscale_(optimizer)
    twins.finish(scaler, optimizer)
    assert good[0].grad.tolist() == [1.0, 2.0]


def test_fp16_sparse_gradients_stay_uncoalesced_on_an_error() -> None:
    sparse = sparse_leaf(torch.float16)
    before = sparse.grad
    scaler = started(OURS, allow_fp16_grads=True)
    with pytest.raises(NotImplementedError):
        scaler.unscale_(optimizer_of([sparse], leaf([1, 2], torch.int32)))
    assert sparse.grad is before
    assert not sparse.grad.is_coalesced()
