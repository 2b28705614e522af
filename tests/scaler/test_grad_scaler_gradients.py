"""Test unusual gradients: subclasses, views, and gradients that cannot be unscaled."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

import amp_ext
from cases import unwritten
from twins import OURS, Wrapped, leaf, sgd, sparse_leaf, started


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
    param.grad = Wrapped(torch.tensor([4.0, math.inf]))
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

    optimizer = sgd(torch.ones(2))
    optimizer.param_groups[0]["params"] = Parameters()
    scaler = started(OURS)
    scaler.unscale_(optimizer)
    [found_inf] = scaler._found_inf_per_device(optimizer).values()
    assert found_inf.item() == 0.0


# ---- gradients that cannot be unscaled -----------------------------------------------------------


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
    "expanded": (
        lambda: with_grad(torch.ones(1).expand(4)),
        RuntimeError,
        "more than one element of the written-to tensor refers to a single memory location",
    ),
    "csr": (
        lambda: with_grad(torch.eye(2).to_sparse_csr()),
        NotImplementedError,
        "must be (a )?strided",
    ),
    "zero": (
        lambda: with_grad(torch._efficientzerotensor(3)),
        RuntimeError,
        "ZeroTensors are immutable",
    ),
    "not a tensor": (lambda: 3, AssertionError, "expected param to be torch.Tensor, got int"),
}


def with_grad(grad: Tensor) -> Tensor:
    param = grad.clone()
    param.grad = grad
    return param


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
    scaler.step(optimizer)
    scaler.update()
    assert good[0].grad.tolist() == [1.0, 2.0]


def test_fp16_sparse_gradients_stay_uncoalesced_on_an_error() -> None:
    sparse = sparse_leaf(torch.float16)
    before = sparse.grad
    scaler = started(OURS, allow_fp16_grads=True)
    with pytest.raises(NotImplementedError):
        scaler.unscale_(optimizer_of([sparse], leaf([1, 2], torch.int32)))
    assert sparse.grad is before
    assert not sparse.grad.is_coalesced()
