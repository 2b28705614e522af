"""Launches of kernels, compiled once for all numbers and addresses.

Triton's own call looks a compiled kernel up by the type, value and alignment of every argument. The
look-up takes longer than most launches here. Kernels here take addresses as numbers, and no number
compiles a kernel anew: a Launcher looks it up by its device alone. Launch hooks, as profilers set
them, see every launch.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver

from amp_ext.triton_kernels.numerics import INTERPRETED, device_function

INTERPRETED_MULTIPROCESSORS = 3


def kernel(function: Any) -> Any:
    """Make a kernel that is compiled once for all numbers: annotated parameters have their type."""
    kinds = function.__annotations__.items()
    numbers = [name for name, kind in kinds if "constexpr" not in str(kind)]
    if INTERPRETED.value:
        # The interpreter patches the modules that a kernel's own module names.
        function.__globals__["core"] = tl.core
    return triton.jit(function, do_not_specialize=numbers)


@functools.cache
def multiprocessors(device: int) -> int:
    """Return a GPU's number of multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch(compiled: Any, programs: int, stream: int, arguments: tuple[Any, ...]) -> None:
    """Launch a compiled kernel with all of its arguments, in order."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    metadata = None
    # A hook is a function, None, or a chain that is usually empty.
    if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
        metadata = compiled.launch_metadata((programs, 1, 1), stream, *arguments)
    else:
        enter = leave = None
    compiled.run(
        *(programs, 1, 1, stream, compiled.function, compiled.packed_metadata),
        *(metadata, enter, leave),
        *arguments,
    )


class Launcher:
    """A kernel with its options, compiled once per device."""

    def __init__(self, kernel: Any, **options: Any) -> None:
        self.kernel, self.options = kernel, options
        self._compiled: dict[int, Any] = {}

    def __call__(self, programs: int, *arguments: Any) -> None:
        """Launch programs with all of the kernel's arguments, in order."""
        if INTERPRETED.value:
            self.kernel[(programs,)](*arguments, **self.options)
            return
        device = driver.active.get_current_device()
        compiled = self._compiled.get(device)
        if compiled is None:
            self._compiled[device] = self.kernel[(programs,)](*arguments, **self.options)
        else:
            launch(compiled, programs, driver.active.get_current_stream(device), arguments)


@device_function
def is_last(ticket, count):
    """Return whether this program draws the last of `count` tickets.

    The last program sees all that the others stored before they drew, past the first cache. The
    ticket is 0 again for the next launch.
    """
    tl.debug_barrier()  # every thread's stores come before the ticket
    drawn = tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    tl.store(ticket, 0, mask=drawn == count - 1)
    return drawn == count - 1
