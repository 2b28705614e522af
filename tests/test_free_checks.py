"""Verdicts of products on the gradients that they wrote: when they are given, and when not.

Where a gradient is not read again, a poison that autograd does not count as a write, put into it
through ``.data``, is not noticed. These tests use it to see what is read: users must not do so.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_ext import _C, ops
from amp_ext.nn import MLP, Linear, LinearActivation
from free_cases import INF, Training, cuda_kernels
from twins import DEVICES, leaf

every_device = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def _own_kernels() -> Iterator[None]:
    with cuda_kernels():
        yield


def poison(grad: Tensor) -> None:
    grad.data.fill_(INF)


# ---- what is judged ----------------------------------------------------------------------------


@every_device
@pytest.mark.parametrize("accumulate", [False, True])
def test_gradient_is_not_read_again(device: str, accumulate: bool) -> None:
    """That of the weight; the bias's is not a product's."""
    training = Training(device, Linear(6, 5, accumulate_grad=accumulate))
    training.backward()
    poison(training.grad)
    assert training.check() == (1, False)


@every_device
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("value", [INF, -INF, math.nan, 1.0])
def test_verdict(device: str, value: float, accumulate: bool) -> None:
    training = Training(device, Linear(6, 5, bias=False, accumulate_grad=accumulate))
    for passes in (1, 2):
        training.optimizer.zero_grad()
        if passes == 2:
            training.layer.weight.grad = torch.ones_like(training.layer.weight)
        training.x[1, 2] = value
        training.backward()
        free = passes == 1 or accumulate
        assert training.check() == (free, not math.isfinite(value))
        assert bool(training.grad.isfinite().all()) == math.isfinite(value)


@every_device
def test_layers(device: str) -> None:
    """Wherever the product is of this package: fused layers, and torch's in a region of ours."""
    for network, weights in (
        (MLP(6, 7, 5), 2),
        (nn.Sequential(LinearActivation(6, 7), nn.Linear(7, 5), Linear(5, 3)), 2),
    ):
        training = Training(device, network)
        training.backward()
        assert training.check() == (weights, False)


def test_dtypes_on_a_cpu() -> None:
    """A product with an FP64 operand is the library's: it is not judged."""
    training = Training()
    for dtype, judged in ((torch.float32, 1), (torch.bfloat16, 1), (torch.float64, 0)):
        training.optimizer.zero_grad()
        out = ops.linear(training.x.to(dtype), training.layer.weight)
        training.scaler.scale(out.sum()).backward()
        assert training.grad.dtype == torch.float32
        assert training.check(training.layer.weight) == (judged, False)


@every_device
def test_no_rows(device: str) -> None:
    training = Training(device)
    training.x = training.x[:0]
    training.backward()
    assert training.check() == (1, False)


@every_device
def test_more_gradients_than_a_pool_has_flags(device: str) -> None:
    """One of them infinite; flags are not used twice, nor one for another."""
    network = nn.ModuleList(Linear(2, 2, bias=False) for _ in range(1500))
    network.forward = lambda x: torch.stack([layer(x[:, :2]) for layer in network]).sum(0)
    training = Training(device, network)
    for bad in (None, 3, 1200, None):
        training.optimizer.zero_grad()
        if bad is not None:
            hook = network[bad].register_forward_hook(lambda *args: args[2] * INF)
        training.backward()
        if bad is not None:
            hook.remove()
        assert training.check() == (1500, bad is not None)


# ---- when a verdict does not hold --------------------------------------------------------------


def other_counter(training: Training) -> None:
    """Another tensor on the same memory, whose versions are counted anew: again from 0 on."""
    training.grad.fill_(INF)
    training.layer.weight.grad = training.grad.data


def other_storage(training: Training) -> None:
    training.grad.data = torch.full_like(training.grad, INF)


def moved_storage(training: Training) -> None:
    training.grad.untyped_storage().resize_(4 * training.grad.nbytes)
    poison(training.grad)


def reallocated(training: Training) -> None:
    """Where the allocator gives the same memory again."""
    for _ in range(10):
        training.layer.weight.grad = None
        training.layer.weight.grad = torch.full_like(training.layer.weight, INF)


CHANGES: dict[str, Callable[[Training], Any]] = {
    "in place": lambda t: t.grad.mul_(INF),
    "view": lambda t: t.grad[1:, 2].fill_(INF),
    "alias": lambda t: t.grad.detach().fill_(INF),
    "out": lambda t: torch.div(t.grad, 0.0, out=t.grad),
    "foreach": lambda t: torch._foreach_mul_([t.grad], INF),
    "own op": lambda t: ops.unscale_([t.grad], torch.zeros(()), torch.tensor(INF)),
    "own product": lambda t: ops.gemm_accumulate_(t.grad, t.grad + INF, torch.ones(6, 6)),
    "set_": lambda t: t.grad.set_(torch.full_like(t.grad, INF)),
    "clipped": lambda t: nn.utils.clip_grad_norm_([t.layer.weight], INF),
    "cleared and added": lambda t: (t.optimizer.zero_grad(set_to_none=False), t.grad.add_(INF)),
    "another": lambda t: setattr(t.layer.weight, "grad", torch.full_like(t.grad, INF)),
    "counter": other_counter,
    "storage": other_storage,
    "moved": moved_storage,
    "reallocated": reallocated,
}


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_changed_gradients_are_read(name: str, accumulate: bool) -> None:
    training = Training(network=Linear(6, 5, accumulate_grad=accumulate))
    if accumulate:
        training.layer.weight.grad = torch.zeros_like(training.layer.weight)
    training.backward()
    CHANGES[name](training)
    if name == "clipped":
        poison(training.grad)
    assert training.check() == (0, True)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "sizes": lambda g: g[:4],
    "strides": lambda g: g.as_strided((5, 6), (0, 1), 0),
    "offset": lambda g: g[1:],
    "transposed": lambda g: g[:, :5].mT,
    "flat": lambda g: g.view(30)[6:],
}


@pytest.mark.parametrize("row", [0, 4])
@pytest.mark.parametrize("name", VIEWS)
def test_verdict_is_on_one_view(name: str, row: int) -> None:
    """Infinities in a row of the gradient do not make infinite what does not show it. It stays one
    tensor, of the same version, alone on its memory."""
    training = Training()
    training.spoil(row)
    version = training.grad._version
    training.grad.data = VIEWS[name](training.grad.data)
    assert training.grad._version == version
    bad = not bool(training.grad.isfinite().all())
    assert training.check(training.layer.weight) == (0, bad)


def set_on(flat: Tensor) -> Tensor:
    return torch.empty(0).set_(flat.untyped_storage(), 0, (5, 6), (6, 1))


@pytest.mark.parametrize(
    "part", [lambda flat: flat.data[:30].view(5, 6), lambda flat: flat[:30].view(5, 6), set_on]
)
def test_memory_with_other_owners(part: Callable[[Tensor], Tensor]) -> None:
    """Their writes may be counted apart."""
    training = Training(network=Linear(6, 5, bias=False, accumulate_grad=True))
    flat = torch.zeros(40)
    training.layer.weight.grad = part(flat)
    training.backward()
    flat.div_(0.0)
    assert training.check() == (0, True)


def test_owners_that_come_later() -> None:
    training = Training()
    training.backward()
    alias = training.grad.data
    poison(alias)
    assert training.check() == (0, True)


def test_verdict_is_on_one_dtype() -> None:
    training = Training()
    training.backward()
    other = torch.zeros(5, 6, dtype=torch.int32)
    other.grad = training.grad.view(torch.int32)
    with pytest.raises(NotImplementedError, match="not implemented for 'Int'"):
        training.check(other)


def test_verdict_is_taken_once() -> None:
    """A fused step unscales gradients, and autograd does not count that."""
    training = Training()
    training.backward()
    assert training.check() == (1, False)
    poison(training.grad)
    assert training.check() == (0, True)


@pytest.mark.parametrize("again", [False, True])
def test_update_forgets(again: bool) -> None:
    """Also when products are asked again."""
    training = Training()
    training.backward()
    training.check(leaf([1.0]))
    training.scaler.update()
    if again:
        training.scaler._free_checks._rest = 0
        training.scaler.scale(torch.ones(()))
    assert _C.judges_gradients() == again
    poison(training.grad)
    assert training.check() == (0, True)


def test_copies_are_read() -> None:
    training = Training()
    training.backward()
    again = copy.deepcopy(training.layer)
    again.weight.grad = copy.deepcopy(training.grad)
    poison(again.weight.grad)
    assert training.check(again.weight) == (0, True)
