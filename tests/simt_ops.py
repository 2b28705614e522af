"""The ops on csrc/kernels as the CPU executes them (tests/simt); torch's memory is the device's.

The environment variable AMP_EXT_SIMT chooses a variant of tests/simt/build.py; that of a sanitizer
also needs its runtime preloaded. AMP_EXT_SIMT_LIBRARY is a library that has been built already.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import (
    Structure,
    byref,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_void_p,
)
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import simt_gemm
from amp_ext import reference
from simt.build import build
from simt.library import Library, Schedule
from simt_gemm import DTYPES


class CTensor(Structure):
    """What simt_ops.cpp knows of a tensor."""

    _fields_ = [("data", c_void_p), ("numel", c_int64), ("dtype", c_int64)]


class ScaleUpdate(Structure):
    """amp_ext::ScaleUpdate."""

    _fields_ = [
        ("scale", c_void_p),
        ("growth_tracker", c_void_p),
        ("hysteresis_tracker", c_void_p),
        ("skipped_steps", c_void_p),
        ("growth_factor", c_double),
        ("backoff_factor", c_double),
        ("growth_interval", c_int64),
        ("hysteresis", c_int32),
        ("min_scale", c_float),
        ("max_scale", c_float),
    ]


def _scale_update(
    scale: Tensor,
    growth_tracker: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    *,
    min_scale: float | None = None,
    max_scale: float | None = None,
    hysteresis: int = 1,
    hysteresis_tracker: Tensor | None = None,
    skipped_steps: Tensor | None = None,
) -> ScaleUpdate:
    limits = torch.finfo(torch.float32)
    written = (scale, growth_tracker, hysteresis_tracker, skipped_steps)
    return ScaleUpdate(
        *(_pointer(tensor) for tensor in written),
        growth_factor,
        backoff_factor,
        growth_interval,
        hysteresis,
        limits.tiny if min_scale is None else min_scale,
        limits.max if max_scale is None else min(max_scale, limits.max),
    )


def _pointer(tensor: Tensor | None) -> c_void_p:
    return c_void_p(None if tensor is None else tensor.data_ptr())


def _is_dense(tensor: Tensor) -> bool:
    """Tell whether the elements fill their memory, in whatever order."""
    reach = 1
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(dim for dim in dims if dim[1] != 1):
        if stride != reach:
            return tensor.numel() == 0
        reach *= size
    return True


def _list(tensors: Sequence[Tensor]) -> ctypes.Array:
    """Return the list as C has it."""
    return (CTensor * len(tensors))(
        *((t.data_ptr(), t.numel(), DTYPES.index(t.dtype)) for t in tensors)
    )


def _copy_back(tensors: Sequence[Tensor], dense: Sequence[Tensor]) -> None:
    for tensor, copy in zip(tensors, dense, strict=True):
        if tensor.data_ptr() != copy.data_ptr():
            tensor.detach().copy_(copy)


class Ops:
    """Functions with the names and arguments of amp_ext.ops.

    Where no schedule is set, each launch has another one: it follows from torch's seed, which
    conftest sets for each test, and from the number of launches since. With `sm90`, products go to
    the kernel for sm_90a where it serves them.
    """

    def __init__(
        self, schedule: Schedule | None = None, path: Path | None = None, sm90: bool = False
    ) -> None:
        self.schedule = schedule
        self._path = path
        self._sm90 = sm90
        self._launch = (0, 0)  # torch's seed, launches since

    @cached_property
    def engine(self) -> Library:
        """Built when it is first used."""
        path = self._path or os.environ.get("AMP_EXT_SIMT_LIBRARY")
        return Library(path or build(os.environ.get("AMP_EXT_SIMT", "plain")))

    def unscale_(
        self,
        grads: Sequence[Tensor],
        found_inf: Tensor,
        inv_scale: Tensor,
        *,
        norm: Tensor | None = None,
        max_norm: float | None = None,
    ) -> None:
        pointers = _pointer(found_inf), _pointer(inv_scale), _pointer(norm)
        limit = c_float(math.inf if max_norm is None else max_norm)
        with self._dense(grads) as dense:
            self._call("simt_unscale", *dense, *pointers, limit)

    def check_finite(self, grads: Sequence[Tensor], found_inf: Tensor) -> None:
        with self._dense(grads, written=False) as dense:
            self._call("simt_check_finite", *dense, _pointer(found_inf))

    def grad_norm(
        self,
        grads: Sequence[Tensor],
        found_inf: Tensor,
        inv_scale: Tensor | None = None,
        *,
        norms: Tensor | None = None,
    ) -> Tensor:
        norm = torch.empty(())
        pointers = [_pointer(tensor) for tensor in (found_inf, inv_scale, norm, norms)]
        with self._dense(grads, written=False) as dense:
            self._call("simt_grad_norm", *dense, *pointers)
        return norm

    def cast_(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Inputs are copied to the order of their outputs, and outputs with holes copied back."""
        dense = [o.detach() if _is_dense(o) else torch.empty_like(o.contiguous()) for o in outputs]
        ordered = [
            i.detach()
            if i.stride() == d.stride()
            else torch.empty_strided(d.shape, d.stride(), dtype=i.dtype).copy_(i.detach())
            for i, d in zip(inputs, dense, strict=True)
        ]
        self._call("simt_cast", _list(dense), _list(ordered), c_int64(len(dense)))
        _copy_back(outputs, dense)

    def update_scale_(
        self,
        scale: Tensor,
        growth_tracker: Tensor,
        found_infs: Sequence[Tensor],
        *factors: float,
        **options: Any,
    ) -> None:
        update = byref(_scale_update(scale, growth_tracker, *factors, **options))
        addresses = (c_void_p * len(found_infs))(*(t.data_ptr() for t in found_infs))
        self._call("simt_update_scale", update, addresses, c_int64(len(found_infs)))

    def gemm(self, a: Tensor, b: Tensor, **options: Any) -> Tensor:
        """What the kernel does not serve is the oracle's, as it is a library's on a GPU."""
        schedule = self.next_schedule()
        result = simt_gemm.gemm(self.engine, schedule, a, b, sm90=self._sm90, **options)
        return reference.gemm(a, b, **options) if result is None else result

    def gemm_accumulate_(self, c: Tensor, a: Tensor, b: Tensor, **options: Any) -> None:
        """Likewise."""
        schedule = self.next_schedule()
        served = simt_gemm.gemm_accumulate_(
            self.engine, schedule, c, a, b, sm90=self._sm90, **options
        )
        if not served:
            reference.gemm_accumulate_(c, a, b, **options)

    def table_seconds(self, grads: Sequence[Tensor]) -> float:
        """Return what it takes at best to build the list's chunk table and compare it."""
        seconds = self.engine.functions.simt_table_seconds
        seconds.restype = c_double
        with self._dense(grads, written=False) as dense:
            return seconds(*dense)

    def _call(self, name: str, *arguments: object) -> None:
        """Call a function that returns a Status; raise RuntimeError with the report if not ok."""
        status = self.engine.call(name, self.next_schedule(), *arguments)
        if status != 0:
            status_text = self.engine.functions.simt_status_text
            status_text.restype = c_char_p
            text = status_text(status).decode()
            raise RuntimeError(f"{name}: {text}: {self.engine.report()}")

    def next_schedule(self) -> Schedule:
        if self.schedule:
            return self.schedule
        seed, launch = torch.initial_seed(), self._launch[1] + 1
        self._launch = (seed, launch if seed == self._launch[0] else 0)
        number = seed + self._launch[1]
        return Schedule(number % 2**64, 1 + number % 4, 1 + number // 4 % 4)

    @contextmanager
    def _dense(
        self, grads: Sequence[Tensor], written: bool = True
    ) -> Iterator[tuple[ctypes.Array, c_int64]]:
        """Give the list as C has it; views with holes are copied there and back."""
        dense = [g.detach() if _is_dense(g) else g.detach().contiguous() for g in grads]
        yield _list(dense), c_int64(len(dense))
        if written:
            _copy_back(grads, dense)
