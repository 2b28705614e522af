"""Who takes part: amp_ext's backends, torch and torch.compile."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

import amp_ext
from amp_ext._library import _C
from harness.registry import BASELINE, Provider, Trial, Work, faults

COMPILE = "compile"
LIBRARY = "library"  # amp_ext with products by torch's GEMM


class Line(NamedTuple):
    """How a provider's line of a table comes about.

    Args:
        launch: the op, or what makes an object that is timed; an op's cases say what it takes.
        around: a context for each sample, entered and left untimed.
    """

    launch: Callable[..., Any]
    around: Callable[[], AbstractContextManager] = nullcontext


@contextmanager
def _choice(backend: str | None, gemm_mode: str) -> Iterator[None]:
    """Choose a backend, and whether its kernels form products or torch's library."""
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
    """The lines of amp_ext: their names, and the context in which each is launched.

    On a CPU "cpu". On a GPU "cuda" and "triton", as far as they are built or installed; with
    `products` (ops that consist of them) also "library".
    """
    if device.type == "cpu":
        return {"cpu": nullcontext}
    from amp_ext._triton import triton_version

    lines = {}
    if _C.cuda_built():
        lines["cuda"] = lambda: _choice("cuda", "kernel")
    if triton_version():
        lines["triton"] = lambda: _choice("triton", "kernel")
    if products:
        lines[LIBRARY] = lambda: _choice(None, "library")
    return lines


def lines(
    mine: Callable[..., Any],
    theirs: Callable[..., Any],
    device: torch.device,
    products: bool = False,
) -> dict[str, Line]:
    """A line for each of amp_ext's backends, as `ours` has them, and torch's, the baseline."""
    contexts = ours(device, products)
    return {
        **{name: Line(mine, around) for name, around in contexts.items()},
        BASELINE: Line(theirs),
    }


def trial(
    lines: Mapping[str, Line],
    timed: Callable[[str, Line], Provider],
    verify: Callable[[str, Line], None],
    work: Work,
    unchecked: Collection[str] = (),
    alive: object = None,
) -> Trial:
    """A trial of one provider a line.

    Args:
        lines: by name.
        timed: makes a line's provider, within its context.
        verify: raises CheckError where a line's result is wrong, within its context.
        work: of one launch.
        unchecked: names of lines that the others are compared with.
        alive: what else has to live as long as the inputs.
    """

    def within(function: Callable[[str, Line], Any], name: str) -> Any:
        with lines[name].around():
            return function(name, lines[name])

    def verify_all(names: Collection[str]) -> dict[str, str]:
        return faults({n: partial(within, verify, n) for n in names if n not in unchecked})

    made = tuple(guarded(name, partial(within, timed, name)) for name in lines)
    return Trial(made, verify_all, work, alive)


def guarded(name: str, make: Callable[[], Provider]) -> Provider:
    """What `make` returns; where it raises, a provider that raises the same when launched, and so
    leaves the others their results."""
    try:
        return make()
    except Exception as error:
        return Provider(name, partial(_raise, error.with_traceback(None)))


def _raise(error: Exception) -> None:
    raise error


@contextmanager
def without_tf32() -> Iterator[None]:
    """FP32 products and convolutions of FP32 precision: by default a GPU's convolutions are of
    TF32, with 10 bits of mantissa."""
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
    """The function by torch.compile; None where that fails.

    Programs compiled before are dropped: a function has only so many at a time.

    Args:
        function: what to compile.
        run: calls the program as the benchmark will, forward and backward, to have it compiled.
    """
    torch.compiler.reset()
    program = torch.compile(function, dynamic=False)
    try:
        run(program)
    except Exception as error:  # of any type: a missing compiler, or what inductor cannot do
        reason = (str(error).splitlines() or [""])[0]
        print(f"{COMPILE} is left out: {type(error).__name__}: {reason}", file=sys.stderr)
        return None
    return program
