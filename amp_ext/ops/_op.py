"""What makes a documented signature the function of an op."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from amp_ext import _library  # noqa: F401  (registers the ops)

P = ParamSpec("P")
T = TypeVar("T")


def op(function: Callable[P, T]) -> Callable[P, T]:
    """Return the op that is called as the function is, without its body.

    Arguments that the caller leaves out are left to the defaults of the schema, which a test
    compares.
    """
    registered = getattr(torch.ops.amp_ext, function.__name__)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return registered(*args, **kwargs)

    return call
