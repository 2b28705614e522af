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
        active = driver.active
        device = active.get_current_device()
        form = (device, self._constants(arguments))
        compiled = self._compiled.get(form)
        if compiled is None:
            self._compiled[form] = self._kernel[(programs,)](*arguments, **self._options)
            return
        stream = active.get_current_stream(device)
        hooks = knobs.runtime
        compiled.run(
            programs,
            1,
            1,
            stream,
            compiled.function,
            compiled.packed_metadata,
            compiled.launch_metadata((programs, 1, 1), stream, *arguments),
            hooks.launch_enter_hook,
            hooks.launch_exit_hook,
            *arguments,
        )
