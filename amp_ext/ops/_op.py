"""Define an op from its documented function.

The function's signature is the op's schema, and its body is the op's reference in plain torch.
C++ implements the op for each dispatch key by name; torch compares each with the schema.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from amp_ext import _library  # noqa: F401  (loads the C++ implementations)

P = ParamSpec("P")
T = TypeVar("T")

_definitions = torch.library.Library("amp_ext", "FRAGMENT")
_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    Sequence[Tensor]: "Tensor[]",
    Sequence[Tensor] | None: "Tensor[]?",
    float: "float",
    float | None: "float?",
    int: "int",
    bool: "bool",
    torch.dtype | None: "ScalarType?",
    None: "()",
}


class Case(NamedTuple):
    """Describe a call of an op for its verification.

    Attributes:
        what: the name of the case.
        arguments: the arguments of the call, on the CPU.
        plans: Plans of gemm.py, each of which computes the product. Without any, the op is called.
        op: the name of the op.
    """

    what: str
    arguments: dict[str, Any]
    plans: Sequence[Any] = ()
    op: str = ""


Cases = Callable[[], Iterator[Case]]


def op(*writes: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Define an op that writes these arguments.

    The decorated function calls the op. The attribute ``reference`` is the function itself. It
    assumes valid arguments on one device.
    """

    def define(function: Callable[P, T]) -> Callable[P, T]:
        name = function.__name__
        _definitions.define(schema(function, writes), tags=(torch.Tag.pt2_compliant_tag,))
        # torch cannot negate a list, or the result of an op that returns nothing. The op's checks
        # refuse such views.
        for key in ("Negative", "Conjugate") if writes else ():
            _definitions.impl(name, torch.library.fallthrough_kernel, key)
        registered = getattr(torch.ops.amp_ext, name)
        # Resolve the overload now. Two threads that resolve it at once would each make one, and
        # torch may keep a pointer to the freed one.
        registered.default  # noqa: B018

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            return registered(*args, **kwargs)

        vars(call)["reference"] = function
        return call

    return define


def schema(function: Callable[..., Any], writes: Sequence[str]) -> str:
    """Return the schema of a function's signature, with aliases for written arguments."""
    signature = inspect.signature(function)
    arguments: list[str] = []
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in arguments:
            arguments.append("*")
        type_name = _TYPES[parameter.annotation]
        if name in writes:
            alias = chr(ord("a") + writes.index(name))
            type_name = type_name.replace("Tensor", f"Tensor({alias}!)")
        default = parameter.default
        end = "" if default is parameter.empty else f"={default}"
        arguments.append(f"{type_name} {name}{end}")
    return f"{function.__name__}({', '.join(arguments)}) -> {_TYPES[signature.return_annotation]}"


def cases(op: Any) -> Callable[[Cases], Cases]:
    """Attach an op's cases, with the example as the first case.

    Every backend reproduces the example bit by bit. The example leaves out no tensor.
    """

    def attach(generator: Cases) -> Cases:
        op.cases = lambda: (case._replace(op=op.__name__) for case in generator())
        return generator

    return attach
