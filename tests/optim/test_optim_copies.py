"""Test float32 weights' copies by a step: autocast uses them while they are right."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import amp_ext
from amp_ext.optim import SGD, AdamW
from amp_ext.optim._step import StepScalars
from autocast_cases import Seen

FP16 = torch.float16


@pytest.fixture
def weight() -> Tensor:
    return torch.randint(-3, 4, (4, 4)).float().requires_grad_()


@pytest.fixture
def optimizer(weight: Tensor) -> SGD:
    """One that has made a step."""
    optimizer = SGD([weight], lr=1.0, autocast_copies=FP16)
    step(optimizer)
    return optimizer


def step(optimizer: torch.optim.Optimizer, found_inf: float | None = None) -> None:
    for weight in optimizer.param_groups[0]["params"]:
        weight.grad = torch.ones_like(weight)
    if found_inf is not None:
        optimizer._step_scalars = StepScalars(torch.tensor(found_inf))
    optimizer.step()
    optimizer._step_scalars = None


def casts(weight: Tensor, dtype: torch.dtype = FP16) -> int:
    """Return the number of casts of a weight in one product, and assert the product."""
    x = torch.eye(4).to(dtype)
    with amp_ext.autocast("cpu", dtype=dtype), Seen() as seen:
        product = x @ weight
    assert product.equal(weight.to(dtype))
    return seen.casts


@pytest.mark.parametrize("kind", [SGD, AdamW], ids=lambda kind: kind.__name__)
def test_no_casts(weight: Tensor, kind: type[torch.optim.Optimizer]) -> None:
    optimizer = kind([weight], lr=0.25, autocast_copies=FP16)
    assert casts(weight) == 1
    for _ in range(2):
        step(optimizer)
        assert casts(weight) == 0
        assert casts(weight) == 0  # in another region too
        with torch.no_grad():
            assert casts(weight) == 0
    weight.grad = None
    with amp_ext.autocast("cpu", dtype=FP16):
        (torch.eye(4) @ weight).sum().backward()
    assert weight.grad.equal(torch.ones(4, 4))


@pytest.mark.parametrize("found_inf", [None, 1.0], ids=["", "a skipped step"])
def test_written_by_someone_else(weight: Tensor, optimizer: SGD, found_inf: float | None) -> None:
    """A step, also a skipped one, leaves a right copy after another write."""
    for in_place in (False, True):
        if in_place:
            weight.detach().add_(1)
        else:
            weight.data = weight.data + 1
        assert casts(weight) == 1, in_place
        step(optimizer, found_inf)
        assert casts(weight) == 0, in_place


@pytest.mark.parametrize("options", [{"master_weights": True}, {"autocast_copies": FP16}], ids=str)
def test_written_before_a_step_that_fails(options: dict[str, object]) -> None:
    """After a failed step, the next one rebuilds masters and copies of rewritten weights."""
    dtype = torch.bfloat16 if "master_weights" in options else torch.float32
    weight, other = (torch.ones(4, 4, dtype=dtype).requires_grad_() for _ in range(2))
    optimizer = SGD([{"params": [weight]}, {"params": [other]}], lr=0.0, **options)
    for param in (weight, other):
        param.grad = torch.ones_like(param)
    optimizer.step()
    with torch.no_grad():
        weight.fill_(5.0)
    other.grad = torch.ones_like(other).to_sparse()
    with pytest.raises(RuntimeError, match="kernels cannot make this step"):
        optimizer.step()
    other.grad = torch.ones_like(other)
    optimizer._step_scalars = StepScalars(torch.tensor(float("autocast_copies" in options)))
    optimizer.step()
    assert weight.equal(torch.full_like(weight, 5.0))
    if "autocast_copies" in options:
        assert casts(weight) == 0


def test_another_order_of_elements() -> None:
    weight = torch.ones(2, 3, 4, 4).requires_grad_()
    optimizer = SGD([weight], lr=1.0, autocast_copies=FP16)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        weight.data = weight.data.to(memory_format=memory_format)
        step(optimizer)
    assert optimizer.state[weight]["autocast_copy"].stride() == weight.stride()


@pytest.mark.parametrize("shared", [False, True], ids=["", "with one version"])
def test_nothing_is_made_anew(shared: bool) -> None:
    """Copies without another write are not rebuilt, whichever parameters have gradients."""
    flat = torch.ones(30)
    parts = flat.split(10) if shared else [torch.ones(10) for _ in range(3)]
    weights = [torch.nn.Parameter(part) for part in parts]
    optimizer = SGD(weights, lr=1.0, momentum=0.5, dampening=0.5, autocast_copies=FP16)
    step(optimizer)
    before = [optimizer.state[weight]["step"] for weight in weights]
    for missing in (None, None) if shared else (None, 0, 2, None):
        for i, weight in enumerate(weights):
            weight.grad = None if i == missing else torch.ones(10)
        optimizer.step()
        assert all(optimizer.state[w]["step"] is b for w, b in zip(weights, before, strict=True))


def test_right_copies_alone_are_used(weight: Tensor, optimizer: SGD) -> None:
    """A region casts anew if other code has written the copy, or has removed it from the state."""
    optimizer.state[weight]["autocast_copy"].zero_()
    assert casts(weight) == 1
    step(optimizer)
    optimizer.state.clear()
    assert casts(weight) == 1


def test_checkpoints_have_none(weight: Tensor, optimizer: SGD) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    assert all("autocast_copy" not in entry for entry in state["state"].values())
    optimizer.load_state_dict(state)
    assert casts(weight) == 1
    step(optimizer)
    assert casts(weight) == 0


def test_16_bit_weights_have_none() -> None:
    weight = torch.ones(4, 4, dtype=FP16).requires_grad_()
    step(optimizer := SGD([weight], lr=1.0, autocast_copies=FP16))
    assert "autocast_copy" not in optimizer.state[weight]
    assert weight.equal(torch.zeros(4, 4, dtype=FP16))


def test_step_before_backward(weight: Tensor, optimizer: SGD) -> None:
    """A step before backward is an error, as for a weight that is itself an operand."""
    x = torch.eye(4).requires_grad_()
    with amp_ext.autocast("cpu", dtype=FP16):
        loss = (x @ weight).sum()
    step(optimizer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
