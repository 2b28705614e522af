"""List the tensors among the arguments of ops, and check that ops refuse bad arguments."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from amp_ext import ops
from cases import tensors, unwritten, written
from reference import arguments

SAID = {"scale": "current_scale", "found_infs": "found_inf"}
"""Names of arguments in error messages, where they differ from the parameter's name."""


class Place(NamedTuple):
    """An argument of an op, or the second tensor of a list."""

    op: str
    argument: str
    index: int | None

    @property
    def said(self) -> str:
        name = self.argument if self.index is None else rf"{self.argument}\[{self.index}\]"
        return SAID.get(self.argument, name)

    @property
    def is_written(self) -> bool:
        return self.argument in written(self.op)

    def of(self, values: dict[str, Any]) -> Tensor:
        value = values[self.argument]
        return value if self.index is None else value[self.index]

    def put(self, values: dict[str, Any], tensor: Tensor) -> None:
        if self.index is None:
            values[self.argument] = tensor
        else:
            values[self.argument][self.index] = tensor


def places(op: str) -> Iterator[Place]:
    for name, value in arguments(op).items():
        if isinstance(value, list):
            yield Place(op, name, 1)
        elif isinstance(value, Tensor):
            yield Place(op, name, None)


def of_ops(names: tuple[str, ...], only: Callable[[Place], bool] = lambda _: True) -> Any:
    found = [place for op in names for place in places(op) if only(place)]
    return pytest.mark.parametrize("place", found, ids=lambda p: f"{p.op}-{p.argument}")


def assert_refused(
    op: str,
    values: dict[str, Any],
    text: str,
    error: type[Exception] = RuntimeError,
    modes: Sequence[type] = (torch.enable_grad, torch.no_grad),
) -> None:
    """Assert that a call in each mode raises an error with the text, and writes nothing.

    Under no_grad, updates check plain tensors by other code.
    """
    versions = [tensor._version for tensor in tensors(values)]
    for mode in modes:
        with mode(), unwritten(tensors(values)), pytest.raises(error, match=text):
            getattr(ops, op)(**values)
    assert [tensor._version for tensor in tensors(values)] == versions
