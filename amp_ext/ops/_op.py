"""What makes a documented signature the function of an op."""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch

from amp_ext._library import _C

P = ParamSpec("P")
T = TypeVar("T")


def op(function: Callable[P, T]) -> Callable[P, T]:
    """The op that is called as the function is, without its body.

    Arguments that the caller leaves out are left to the defaults of the schema, which a test
    compares.
    """
    registered = getattr(torch.ops.amp_ext, function.__name__)
    direct = _C.op_caller(function.__name__, registered)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return direct(*args, **kwargs)

    _CALLS.append((direct, registered))
    return call


_CALLS: list[tuple[Callable, Callable]] = []


def tell_dynamo(_: ModuleType) -> None:
    """Has torch.compile see torch's ops, which it knows, in place of ours."""
    for direct, registered in _CALLS:

        def traced(*args: Any, _op: Callable = registered, **kwargs: Any) -> Any:
            return _op(*args, **kwargs)

        torch.compiler.substitute_in_graph(direct, skip_signature_check=True)(traced)
