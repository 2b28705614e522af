"""Casts around single functions, in effect once ``amp.initialize`` has been called with O1."""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from amp_ext.apex._options import HALVES
from amp_ext.apex._state import amp_state
from amp_ext.autocast import autocast

Function = Callable[..., Any]


def half_function(fn: Function) -> Function:
    """Decorator: float32 arguments are cast to float16."""
    return _casting(fn, _to_half, within_region=True)


def float_function(fn: Function) -> Function:
    """Decorator: float16 and bfloat16 arguments are cast to float32, and no op within it is
    autocast."""
    return _casting(fn, _to_float, within_region=False)


def promote_function(fn: Function) -> Function:
    """Decorator: arguments are cast to the widest of their floating-point dtypes."""
    return _casting(fn, _to_widest, within_region=True)


def register_half_function(module: Any, name: str) -> None:
    """:func:`half_function` for ``module.name``, within which no op is autocast.

    Raises:
        ValueError: the module has no such function.
    """
    _register(module, name, _to_half)


def register_float_function(module: Any, name: str) -> None:
    """:func:`float_function` for ``module.name``; raises as :func:`register_half_function`."""
    _register(module, name, _to_float)


def register_promote_function(module: Any, name: str) -> None:
    """:func:`promote_function` for ``module.name``, within which no op is autocast; raises as
    :func:`register_half_function`."""
    _register(module, name, _to_widest)


@contextmanager
def disable_casts() -> Iterator[None]:
    """Within it, models and functions run without autocast, in this process."""
    before, amp_state.casts = amp_state.casts, False
    try:
        with without_regions():
            yield
    finally:
        amp_state.casts = before


@contextmanager
def without_regions() -> Iterator[None]:
    with ExitStack() as regions:
        for device_type in amp_state.device_types:
            regions.enter_context(autocast(device_type, torch.float16, enabled=False))
        yield


def _register(module: Any, name: str, cast: Callable[[Any], Any]) -> None:
    if not hasattr(module, name):
        raise ValueError(f"amp.register_..._function: {module} has no function {name!r}")
    fn = getattr(module, name)
    fn = getattr(fn, "_amp_function", fn)  # the last registration counts
    casting = _casting(fn, cast, within_region=False)
    casting._amp_function = fn
    setattr(module, name, casting)


def _casting(fn: Function, cast: Callable[[Any], Any], within_region: bool) -> Function:
    @functools.wraps(fn)
    def casting(*args: Any, **kwargs: Any) -> Any:
        options = amp_state.opt_properties
        if options is None or not options.patch_torch_functions or not amp_state.casts:
            return fn(*args, **kwargs)
        args, kwargs = cast((args, kwargs))
        if within_region:
            return fn(*args, **kwargs)
        with without_regions():
            return fn(*args, **kwargs)

    return casting


def _cast(tree: Any, dtypes: tuple[torch.dtype, ...], to: torch.dtype) -> Any:
    def cast(leaf: Any) -> Any:
        return leaf.to(to) if isinstance(leaf, Tensor) and leaf.dtype in dtypes else leaf

    return tree_map(cast, tree)


def _to_half(tree: Any) -> Any:
    return _cast(tree, (torch.float32,), torch.float16)


def _to_float(tree: Any) -> Any:
    return _cast(tree, HALVES, torch.float32)


def _to_widest(tree: Any) -> Any:
    floats = (*HALVES, torch.float32, torch.float64)
    found = {leaf.dtype for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)} & set(floats)
    if len(found) < 2:
        return tree
    return _cast(tree, floats, functools.reduce(torch.promote_types, found))
