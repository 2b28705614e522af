"""Compare the executor, or a GPU, with NVIDIA's manual of single instructions.

    python tests/probe/run.py
    python tests/probe/run.py --device cuda

The GPU has compute capability 9.0. A wrong assumption may hang, or end a process's use of the GPU:
there each probe runs in a fork. The exit status is 1 when a probe disagrees.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from probe import nvcc
from probe.probes import PROBES
from ptx_backend import build
from ptx_backend.build import BUILD, CSRC, Unit

LIMIT = 20  # seconds for a probe on a GPU


@cache
def executor() -> ctypes.CDLL:
    folder = BUILD / "probe"
    flags = ["-std=c++20", "-Xcompiler=-fPIC", f"-I{CSRC}/include", f"-I{CSRC}/kernels"]
    objects = build.compile_all([Unit(nvcc.SOURCE, flags)], "90a", folder)
    library = ctypes.CDLL(str(build.link("probe", objects, "90a", folder)))
    library.ptx_report.restype = ctypes.c_char_p
    return library


def call_ptx(name: str, seed: int, tensors: list[Tensor], *arguments: int) -> None:
    """Run a probe on the executor of tests/cudasim, in the schedule of a seed."""
    library = executor()
    library.ptx_start(ctypes.c_uint64(seed))
    for tensor in tensors:
        library.ptx_allow(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_int64(tensor.nbytes))
    if error := getattr(library, f"probe_{name}")(*addresses(tensors), *arguments):
        raise RuntimeError(f"CUDA error {error}, {library.ptx_report().decode()}")


def call_cuda(name: str, seed: int, tensors: list[Tensor], *arguments: int) -> None:
    """Run a probe on a GPU, which has its own schedule."""
    library = ctypes.CDLL(str(nvcc.compile()[0]))
    torch.cuda.synchronize()
    error = getattr(library, f"probe_{name}")(*addresses(tensors), *arguments)
    torch.cuda.synchronize()
    if error:
        raise RuntimeError(f"CUDA error {error}")


def addresses(tensors: list[Tensor]) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]


def check(name: str, on_gpu: bool = False, seed: int = 0) -> str:
    """Return how a probe disagrees with the manual; empty if it agrees."""
    device, call = ("cuda", call_cuda) if on_gpu else ("cpu", call_ptx)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for case in PROBES[name]():
            output = case.before
            if output is None:
                output = torch.empty_like(case.expected)
                output.view(torch.uint8).fill_(0xA5)
            tensors = [case.input.to(device), output.to(device)]
            try:
                call(name, seed, tensors, *case.arguments)
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
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("ptx", "cuda"), default="ptx")
    on_gpu = parser.parse_args().device == "cuda"
    # A process that has used the GPU cannot pass it on to forks.
    if missing := forked(nvcc.missing) if on_gpu else build.missing():
        parser.error(missing)
    if on_gpu:
        nvcc.compile()
    faults = []
    for probe, cases in PROBES.items():
        print(f"{probe:<19}{cases.__doc__:<63}", end="", flush=True)
        faults.append(forked(check, probe, True) if on_gpu else check(probe))
        print(faults[-1] or "ok", flush=True)
    return int(any(faults))


if __name__ == "__main__":
    sys.exit(main())
