"""Ops that go past the dispatcher where nobody looks on, and through it where somebody does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from amp_ext import ops


class Direct(NamedTuple):
    """An op with a call of it, and what that leaves in the tensor given to it."""

    name: str
    call: Callable[[Tensor], None]
    before: float
    after: float


def cast(output: Tensor) -> None:
    ops.cast_([output], [output.new_ones((), dtype=torch.float16)])


def update_scale(scale: Tensor) -> None:
    tracker = scale.new_zeros((), dtype=torch.int32)
    ops.update_scale_(scale, tracker, [scale.new_zeros(())], 2.0, 0.5, 1)


every_direct_op = pytest.mark.parametrize(
    "op",
    [Direct("cast_", cast, 0.0, 1.0), Direct("update_scale_", update_scale, 4.0, 8.0)],
    ids=lambda op: op.name,
)


class Subclass(Tensor):
    """Notes what torch is asked for."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


class Watch(TorchDispatchMode):
    """Notes what the dispatcher is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@every_direct_op
def test_plain_tensors_go_past_the_dispatcher(op: Direct, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_ops", None)
    tensor = torch.tensor(op.before)
    version = tensor._version
    op.call(tensor)
    assert tensor.item() == op.after
    assert tensor._version == version + 1


@every_direct_op
def test_a_dispatch_mode_sees_the_op(op: Direct) -> None:
    tensor = torch.tensor(op.before)
    with Watch() as watch:
        op.call(tensor)
    assert f"amp_ext.{op.name}.default" in watch.seen
    assert tensor.item() == op.after


@every_direct_op
def test_a_profiler_sees_the_op(op: Direct) -> None:
    with torch.profiler.profile() as profile:
        op.call(torch.tensor(op.before))
    assert f"amp_ext::{op.name}" in [event.key for event in profile.key_averages()]


@every_direct_op
def test_a_subclass_sees_the_op(op: Direct) -> None:
    Subclass.seen.clear()
    op.call(torch.tensor(op.before).as_subclass(Subclass))
    assert f"amp_ext.{op.name}" in Subclass.seen


@every_direct_op
def test_fake_tensors_are_served(op: Direct) -> None:
    with FakeTensorMode():
        op.call(torch.tensor(op.before))


def test_arguments_of_other_types_are_errors_of_the_op() -> None:
    scale, tracker = torch.tensor(4.0), torch.zeros((), dtype=torch.int32)
    with pytest.raises((RuntimeError, TypeError), match="amp_ext::update_scale_"):
        ops.update_scale_(scale, tracker, [torch.zeros(())], 2.0, 0.5, 1.5)
    assert scale.item() == 4.0


@pytest.mark.parametrize("place", ["found_infs", "hysteresis_tracker", "skipped_steps"])
def test_any_tensor_of_an_update_may_be_a_subclass(place: str) -> None:
    scale, tracker = torch.tensor(4.0), torch.zeros((), dtype=torch.int32)
    tensors = {
        "found_infs": torch.zeros(()),
        "hysteresis_tracker": torch.ones((), dtype=torch.int32),
        "skipped_steps": torch.zeros((), dtype=torch.int64),
    }
    tensors[place] = tensors[place].as_subclass(Subclass)
    Subclass.seen.clear()
    ops.update_scale_(scale, tracker, [tensors.pop("found_infs")], 2.0, 0.5, 1, **tensors)
    assert "amp_ext.update_scale_" in Subclass.seen
    assert scale.item() == 8.0
