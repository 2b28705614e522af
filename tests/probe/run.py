"""Compare a GPU, or the executor, with NVIDIA's manual of single instructions.

    python tests/probe/run.py
    python tests/fake_cuda/run.py tests/probe/run.py

The GPU has compute capability 9.0. A wrong assumption may hang, or end a process's use of the GPU:
each probe runs in a fork. The exit status is 1 when a probe disagrees.
"""

import ctypes
import multiprocessing
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from probe import nvcc
from probe.probes import PROBES

LIMIT = 20  # seconds for a probe


def call(name: str, tensors: list[Tensor], *arguments: int) -> None:
    """Run a probe."""
    addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    library = ctypes.CDLL(str(nvcc.compile()[0]))
    torch.cuda.synchronize()
    error = getattr(library, f"probe_{name}")(*addresses, *arguments)
    torch.cuda.synchronize()
    if error:
        raise RuntimeError(f"CUDA error {error}")


def check(name: str, seed: int = 0) -> str:
    """Return how a probe disagrees with the manual; empty if it agrees."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for case in PROBES[name]():
            output = case.before
            if output is None:
                output = torch.empty_like(case.expected)
                output.view(torch.uint8).fill_(0xA5)
            tensors = [case.input.cuda(), output.cuda()]
            try:
                call(name, tensors, *case.arguments)
                torch.testing.assert_close(tensors[1].cpu(), case.expected, rtol=0, atol=0)
            except (AssertionError, RuntimeError) as fault:
                return f"{name}{case.arguments}: {' '.join(str(fault).split())}"
    return ""


def forked(function: Callable[..., str], *arguments: object) -> str:
    """Return a function's text from a fork, which an alarm ends in time."""
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, context, signal.alarm, (LIMIT,)) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            return f"the process has ended, or has taken {LIMIT} s"


def main() -> int:
    """Print a line for each probe: ok, or its disagreement."""
    # A process that has used the GPU cannot pass it on to forks.
    if missing := forked(nvcc.missing):
        sys.exit(missing)
    nvcc.compile()
    faults = []
    for probe, cases in PROBES.items():
        print(f"{probe:<19}{cases.__doc__:<63}", end="", flush=True)
        faults.append(forked(check, probe))
        print(faults[-1] or "ok", flush=True)
    return int(any(faults))


if __name__ == "__main__":
    sys.exit(main())
