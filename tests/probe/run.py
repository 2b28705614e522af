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
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from probe import nvcc, probes
from probe.probes import Case
from ptx_backend import build
from ptx_backend.build import BUILD, CSRC, Unit

PROBES = {probe.__name__: probe for probe in probes.PROBES}
LIMIT = 20  # seconds for a probe on a GPU


class Ptx:
    """The executor of tests/cudasim."""

    device = torch.device("cpu")

    @staticmethod
    @cache
    def library() -> ctypes.CDLL:
        folder = BUILD / "probe"
        flags = ["-std=c++20", "-Xcompiler=-fPIC", f"-I{CSRC}/include", f"-I{CSRC}/kernels"]
        objects = build.compile_all([Unit(path, flags) for path in nvcc.SOURCES], "90a", folder)
        library = ctypes.CDLL(str(build.link("probe", objects, "90a", folder)))
        library.ptx_report.restype = ctypes.c_char_p
        return library

    def call(self, name: str, seed: int, tensors: Sequence[Tensor], *arguments: int) -> str:
        """Run a probe in the schedule of a seed; return its error."""
        library = self.library()
        library.ptx_start(ctypes.c_uint64(seed))
        for tensor in tensors:
            library.ptx_allow(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_int64(tensor.nbytes))
        error = getattr(library, f"probe_{name}")(*addresses(tensors), *arguments)
        return f"CUDA error {error}, {library.ptx_report().decode()}" if error else ""


class Cuda:
    """A GPU with its own schedule."""

    device = torch.device("cuda")

    @staticmethod
    @cache
    def library() -> ctypes.CDLL:
        return ctypes.CDLL(str(nvcc.compile()[0]))

    def call(self, name: str, seed: int, tensors: Sequence[Tensor], *arguments: int) -> str:
        """Run a probe; return its error."""
        try:
            torch.cuda.synchronize()
            error = getattr(self.library(), f"probe_{name}")(*addresses(tensors), *arguments)
            torch.cuda.synchronize()
        except RuntimeError as fault:
            return str(fault).partition("\n")[0]
        return f"CUDA error {error}" if error else ""


def addresses(tensors: Sequence[Tensor]) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]


DEVICES = {"ptx": Ptx(), "cuda": Cuda()}


def difference(got: Tensor, expected: Tensor) -> str:
    """Return the places of wrong numbers; empty if all are right."""
    wrong = (got != expected).flatten().nonzero().flatten()
    if not len(wrong):
        return ""
    first = wrong[0]
    numbers = f"{got.flatten()[first].item()}, not {expected.flatten()[first].item()}"
    return f"{len(wrong)} of {got.numel()} numbers differ, the first at {first}: {numbers}"


def check_case(name: str, case: Case, device: Ptx | Cuda, seed: int) -> str:
    """Return how one call disagrees with the manual; empty if it agrees."""
    input = case.input.to(device.device)
    if case.before is None:
        output = torch.empty_like(case.expected, device=device.device)
        output.view(torch.uint8).fill_(0xA5)
    else:
        output = case.before.to(device.device)
    fault = device.call(name, seed, (input, output), *case.arguments)
    return fault or difference(output.cpu(), case.expected)


def check(name: str, device: Ptx | Cuda, seed: int = 0) -> str:
    """Return how a probe disagrees with the manual; empty if it agrees."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for case in PROBES[name]():
            if fault := check_case(name, case, device, seed):
                return f"{name}{case.arguments}: {fault}"
    return ""


def forked(function: Callable[..., str], *arguments: object) -> str:
    """Return a function's text from a fork, or why the fork has sent none."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=lambda: sender.send(function(*arguments)))
    process.start()
    process.join(LIMIT)
    if process.is_alive():
        process.kill()
        process.join()
        return f"no end within {LIMIT} s"
    has_answer = process.exitcode == 0 and receiver.poll()
    return receiver.recv() if has_answer else f"exit status {process.exitcode}"


def direct(function: Callable[..., str], *arguments: object) -> str:
    return function(*arguments)


def main() -> int:
    """Print a line for each probe: ok, or its disagreement."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=DEVICES, default="ptx")
    name = parser.parse_args().device
    # A process that has used the GPU cannot pass it on to forks.
    run = forked if name == "cuda" else direct
    if missing := run({"ptx": build, "cuda": nvcc}[name].missing):
        parser.error(missing)
    if name == "cuda":
        nvcc.compile()
    faults = []
    for probe, cases in PROBES.items():
        print(f"{probe:<19}{cases.__doc__:<63}", end="", flush=True)
        faults.append(run(check, probe, DEVICES[name]))
        print(faults[-1] or "ok", flush=True)
    return int(any(faults))


if __name__ == "__main__":
    sys.exit(main())
