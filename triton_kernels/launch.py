"""Launches of kernels by what they were compiled to.

Triton looks up the compiled form of each call by the type, value and alignment of every argument,
which takes longer than most launches here. A Launcher is for calls between which these do not
differ; hooks of Triton, as profilers set them, see its launches.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from amp_ext.triton_kernels.numerics import INTERPRETED
from triton import knobs
from triton.runtime import driver


def launch(compiled: Any, programs: int, stream: int, arguments: tuple[Any, ...]) -> None:
    """Launch so many programs of a compiled kernel, for all parameters in their order.

    For tensors it takes their addresses.
    """
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    metadata = None
    # Functions, None, or chains, which are usually empty.
    if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
        metadata = compiled.launch_metadata((programs, 1, 1), stream, *arguments)
    else:
        enter = leave = None
    compiled.run(
        programs,
        1,
        1,
        stream,
        compiled.function,
        compiled.packed_metadata,
        metadata,
        enter,
        leave,
        *arguments,
    )


class Launcher:
    """A kernel with its options, and what it was compiled to on each device for each value of its
    constexpr parameters.
    """

    def __init__(self, kernel: Any, options: dict[str, Any]) -> None:
        self._kernel = kernel
        self._options = options
        constants = [] if INTERPRETED.value else [p.num for p in kernel.params if p.is_constexpr]
        self._constants = itemgetter(*constants) if constants else lambda arguments: None
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(self, programs: int, *arguments: Any) -> None:
        """Launch so many programs, for all parameters in their order."""
        if INTERPRETED.value:
            self._kernel[(programs,)](*arguments, **self._options)
            return
        device = driver.active.get_current_device()
        form = (device, self._constants(arguments))
        compiled = self._compiled.get(form)
        if compiled is None:
            self._compiled[form] = self._kernel[(programs,)](*arguments, **self._options)
        else:
            launch(compiled, programs, driver.active.get_current_stream(device), arguments)
