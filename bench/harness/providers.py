"""Make the providers of a case: amp_ext's backends, torch and torch.compile."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

import amp_ext
from amp_ext._library import _C
from harness.registry import BASELINE, Provider, Trial, Work, described, faults

COMPILE = "compile"
LIBRARY = "library"  # amp_ext with products by torch's GEMM


class Line(NamedTuple):
    """Pair a provider's callable with the context of each sample.

    Args:
        launch: the op, or a factory of the timed object, as the op's cases define.
        around: a context for each sample, entered and left untimed.
    """

    launch: Callable[..., Any]
    around: Callable[[], AbstractContextManager] = nullcontext


@contextmanager
def _choice(backend: str | None, gemm_mode: str) -> Iterator[None]:
    """Choose a backend, and kernels or torch's library for products."""
    before = amp_ext.get_backend(), _C.gemm_mode()
    amp_ext.set_backend(backend)
    _C.set_gemm_mode(gemm_mode)
    try:
        yield
    finally:
        amp_ext.set_backend(before[0])
        _C.set_gemm_mode(before[1])


def ours(
    device: torch.device, products: bool = False
) -> dict[str, Callable[[], AbstractContextManager]]:
    """Return the backends of amp_ext that are here, by name, with their contexts.

    Args:
        device: a CPU has "cpu", a GPU "cuda" and "triton".
        products: add "library" on a GPU.
    """
    if device.type == "cpu":
        return {"cpu": nullcontext}
    from amp_ext._triton import triton_version

    found = {}
    if _C.cuda_built():
        found["cuda"] = lambda: _choice("cuda", "kernel")
    if triton_version():
        found["triton"] = lambda: _choice("triton", "kernel")
    if products:
        found[LIBRARY] = lambda: _choice(None, "library")
    return found


def lines(
    mine: Callable[..., Any],
    theirs: Callable[..., Any],
    device: torch.device,
    products: bool = False,
) -> dict[str, Line]:
    """Return a line for each of amp_ext's backends, and the baseline's."""
    made = {name: Line(mine, around) for name, around in ours(device, products).items()}
    return {**made, BASELINE: Line(theirs)}


def trial(
    lines: Mapping[str, Line],
    timed: Callable[[str, Line], Provider],
    verify: Callable[[str, Line], None],
    work: Work,
    unchecked: Collection[str] = (),
    alive: object = None,
) -> Trial:
    """Make a trial of one provider a line.

    Args:
        lines: by name.
        timed: makes a line's provider, within its context.
        verify: raises CheckError for a line's wrong result, within its context.
        work: of one launch.
        unchecked: names of the lines that the others are compared with.
        alive: other objects that live as long as the inputs.
    """

    def within(function: Callable[[str, Line], Any], name: str) -> Any:
        with lines[name].around():
            return function(name, lines[name])

    def verify_all(names: Collection[str]) -> dict[str, str]:
        return faults({n: partial(within, verify, n) for n in names if n not in unchecked})

    made = tuple(guarded(name, partial(within, timed, name)) for name in lines)
    return Trial(made, verify_all, work, alive)


def guarded(name: str, make: Callable[[], Provider]) -> Provider:
    """Call `make`; if it raises, return a provider that raises the error when launched."""
    try:
        return make()
    except Exception as error:
        return Provider(name, partial(_raise, error.with_traceback(None)))


def _raise(error: Exception) -> None:
    raise error


@contextmanager
def without_tf32() -> Iterator[None]:
    """Compute FP32 products and convolutions in FP32 precision."""
    switches = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [switch.allow_tf32 for switch in switches]
    try:
        for switch in switches:
            switch.allow_tf32 = False
        yield
    finally:
        for switch, allowed in zip(switches, before, strict=True):
            switch.allow_tf32 = allowed


def compiled(
    function: Callable[..., object], run: Callable[[Callable[..., object]], object]
) -> Callable[..., object] | None:
    """Return the function by torch.compile; None and a note where that fails.

    Args:
        function: to be compiled; programs compiled before are dropped.
        run: calls the program as the benchmark will, forward and backward.
    """
    torch.compiler.reset()
    program = torch.compile(function, dynamic=False)
    try:
        run(program)
    except Exception as error:  # of any type: a missing compiler, or an op that inductor lacks
        print(f"{COMPILE} is left out: {described(error).partition(chr(10))[0]}", file=sys.stderr)
        return None
    return program
