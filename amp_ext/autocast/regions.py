"""Run the matrix products of mixed-precision regions on this package's GEMM."""

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Imported by name: Dynamo does not compile a function that refers to no module of torch and no
# tensor. If a compiled program resumes in a region, it would fail on __enter__ and __exit__.
from torch import autocast as torchs_autocast
from torch import compiler, is_autocast_enabled, ops, set_autocast_enabled
from torch._C import _is_any_autocast_enabled
from torch.compiler import is_compiling

from amp_ext._library import _C

_MARK = _C.REGION_MARK  # a device type: autocast is enabled for it in a region of ours
_override_autocast = ops.amp_ext._override_autocast.default
_TAG = "amp_ext"
_TAGS_REGIONS = torch.__version__ < "2.13"  # which finds programs by "some autocast is enabled"


class autocast:
    """Run ``torch.autocast`` with this package's products and FP32 gradients of FP32 operands.

    The class takes the arguments of ``torch.autocast``, raises its errors, and works as a context
    manager and as a decorator. Results have the dtypes of ``torch.autocast``. The region holds for
    its thread. Within it these operations run on :func:`amp_ext.ops.gemm`: linear, mm, addmm,
    matmul (``@``), bmm, baddbmm, the contractions of einsum, and convolutions of 1 x 1 pixels
    (conv2d, stride 1, one group).

    * The gradient of a float32 operand, such as a weight, is computed in float32. It never passes
      through float16, where it could overflow above 65504 or vanish below 2**-24.
    * A float32 weight is cast once per version and dtype. A weight changed in place, or a region of
      another dtype, has a new cast at once.
    * On a CPU without instructions for float16, torch's float32 library computes large float16
      products.

    torch's code computes everything else. It also serves operands of float64 or of other devices,
    tensor subclasses, nested tensors, transforms of ``torch.func`` and forward-mode
    differentiation.

    Args:
        device_type: "cuda", "cpu" or another device type of torch's.
        dtype: float16 or bfloat16; torch's default for the device type when None.
        enabled: whether to cast at all.
        cache_enabled: whether to keep casts of weights; as around the region when None.
    """

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        self._arguments = (device_type, dtype, enabled, cache_enabled)
        self._region = None if is_compiling() else torchs_autocast(*self._arguments)

    def __getattr__(self, name: str) -> Any:
        """Return ``device``, ``fast_dtype`` and the other attributes of ``torch.autocast``."""
        if name.startswith("__") or "_arguments" not in vars(self):  # copy.copy looks these up
            raise AttributeError(name)
        return getattr(self._torchs_region(), name)

    def _torchs_region(self) -> torchs_autocast:
        if self._region is None:  # it was made in a compiled function
            self._region = torchs_autocast(*self._arguments)
        return self._region

    def __enter__(self) -> "autocast":
        if is_compiling():
            self._traced = _traced_region(self._arguments)
            self._traced.__enter__()
            return self
        region = self._torchs_region()
        _C.enter_region()
        try:
            region.__enter__()
        except BaseException:
            _C.exit_region()
            raise
        self._was_marked = is_autocast_enabled(_MARK)
        set_autocast_enabled(_MARK, False)
        within_ours = self._was_marked and _is_any_autocast_enabled()  # of another device type
        set_autocast_enabled(_MARK, self._arguments[2] or within_ours)
        if _TAGS_REGIONS:
            tag_programs()
        return self

    def __exit__(self, *exception: Any) -> bool | None:
        if is_compiling():
            return self._traced.__exit__(*exception)
        set_autocast_enabled(_MARK, self._was_marked)
        result = self._torchs_region().__exit__(*exception)
        _C.exit_region()
        if _TAGS_REGIONS:
            tag_programs()
        return result

    def __copy__(self) -> "autocast":
        """Return a region of the same class that has not been entered."""
        copied = type(self).__new__(type(self))
        vars(copied).update(vars(self), _region=copy.copy(self._region))
        return copied

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if not callable(function):
            return torchs_autocast(*self._arguments)(function)  # raises

        @functools.wraps(function)
        def within_region(*args: Any, **kwargs: Any) -> Any:
            with self.__copy__():  # the function may call itself
                return function(*args, **kwargs)

        return within_region


def tag_programs() -> None:
    """Tell programs apart that torch.compile keeps on disk, for other processes too."""
    config = compiler.config
    is_ours = _C.is_installed() or (_TAGS_REGIONS and is_autocast_enabled(_MARK))
    config.cache_key_tag = config.cache_key_tag.removesuffix(_TAG) + _TAG * is_ours


@contextmanager
def _traced_region(arguments: tuple[Any, ...]) -> Iterator[None]:
    """Build the same region of context managers that Dynamo can trace."""
    with torchs_autocast(*arguments):
        # In torch 2.11 is_exporting() is also true in functions that torch.compile traces.
        if compiler._is_exporting_flag:
            yield
        else:
            _override_autocast()
            is_ours = arguments[2] or is_autocast_enabled(_MARK)
            with torchs_autocast(_MARK, torch.float16, is_ours):
                yield
