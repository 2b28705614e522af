"""Test unusual gradients and scalers: subclasses of either, views, and autograd's state."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import amp_ext
from twins import (
    OURS,
    Recording,
    ScalerClass,
    grads,
    leaf,
    plain,
    same_outcome,
    sgd,
    started,
    state_of,
)


@pytest.mark.parametrize("way", ["subclass", "instance"])
@pytest.mark.parametrize("call", ["unscale_", "step", "fused step", "_check_inf_per_device"])
def test_overridden_unscale_grads_is_honoured(call: str, way: str) -> None:
    """An overridden _unscale_grads_ is honoured, as for a trainer's reduction over ranks."""

    def script(scaler_class: ScalerClass) -> Any:
        calls = []

        def overflow(scaler: Any, optimizer: Any, *args: Any) -> Any:
            found = scaler_class._unscale_grads_(scaler, optimizer, *args)
            calls.append([*args])
            return {device: torch.ones_like(flag) for device, flag in found.items()}

        name = "GradScaler"
        cls = type(
            name, (scaler_class,), {"_unscale_grads_": overflow} if way == "subclass" else {}
        )
        scaler = started(cls)
        if way == "instance":
            scaler._unscale_grads_ = lambda *args: overflow(scaler, *args)
        fused = call == "fused step"
        optimizer = torch.optim.Adam([leaf([4.0, 2.0])], fused=fused)
        result = getattr(scaler, "step" if fused else call)(optimizer)
        before = state_of(scaler, [optimizer])
        scaler.update()
        return result, before, calls, scaler.get_scale()

    _, (_, _, calls, scale) = same_outcome(script)
    assert (len(calls), scale) == (1, 2.0)


class Subclass(Tensor):
    """A tensor subclass for torch functions only."""


def test_tensor_subclass_gradients_take_torchs_way() -> None:
    """A gradient of a tensor subclass decides on its own ops, here among plain gradients."""
    Recording.ops.clear()
    inner = torch.tensor([4.0, 8.0])
    param = Recording(torch.ones(2))
    param.grad = Recording(inner)
    scaler, optimizer = started(OURS), sgd(leaf([12.0]))
    optimizer.param_groups[0]["params"].append(param)
    scaler.unscale_(optimizer)
    assert "aten::_amp_foreach_non_finite_check_and_unscale_" in Recording.ops
    assert inner.tolist() == [1.0, 2.0]
    assert grads(optimizer)[0].tolist() == [3.0]
    assert plain(scaler._found_inf_per_device(optimizer)) == plain(
        {torch.device("cpu"): torch.tensor(0.0)}
    )


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


@pytest.mark.parametrize("value", [8.0, math.inf])
def test_subclass_gradients_are_unscaled(value: float) -> None:
    def script(scaler_class: ScalerClass) -> Any:
        param = torch.ones(2)
        param.grad = torch.tensor([4.0, value]).as_subclass(Subclass)
        scaler, optimizer = started(scaler_class), sgd(param)
        scaler.step(optimizer)
        scaler.update()
        return param, param.grad.as_subclass(Tensor), scaler.get_scale()

    assert same_outcome(script)[0] == "returned"


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[:, :2],
        lambda t: t[1:, 1:],
        lambda t: t.flatten()[3:3],
    ],
    ids=["transposed", "columns", "block", "empty"],
)
def test_views_as_gradients(view: Any) -> None:
    def script(scaler_class: ScalerClass) -> Any:
        whole = torch.arange(12.0).view(3, 4)
        grad = view(whole)
        param = torch.ones(grad.shape)
        param.grad = grad
        scaler, optimizer = started(scaler_class), sgd(param)
        scaler.unscale_(optimizer)
        seen = [whole.clone(), param.grad.clone()]
        scaler.step(optimizer)
        return seen, param

    assert same_outcome(script)[0] == "returned"


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
