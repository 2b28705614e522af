"""Check what tests/simt assumes of a GPU, each assumption alone, by what NVIDIA's manual says.

    python bench/gpu/probe.py --device simt
    python bench/gpu/probe.py --device cuda
    python bench/gpu/probe.py --device cuda --probe wgmma_k_major

On a GPU, one of compute capability 9.0, each probe has a process of its own and a time limit,
because a wrong assumption may hang. The exit status is 1 when a probe disagrees.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpu import probe_cases
from gpu.probe_cases import Case
from simt import build, nvcc
from simt.library import Library, Schedule

PROBES: dict[str, Callable[[], Iterator[Case]]] = {
    probe.__name__: probe for probe in probe_cases.PROBES
}
SOURCE = Path(__file__).with_name("probe.cu")
LIMIT = 20  # seconds for a process that uses the GPU, of which torch's import takes some
PROCESSES = 8  # of these at a time


class Simt:
    """The executor of tests/simt."""

    device = torch.device("cpu")

    @staticmethod
    @cache
    def library() -> Library:
        return Library(build.build("plain", "probe", [SOURCE]))

    def call(self, name: str, seed: int, *arguments: object) -> str:
        """Run a probe in the schedule of a seed; return what went wrong."""
        library = self.library()
        error = library.call(f"probe_{name}", Schedule(seed, resident_blocks=8), *arguments)
        return f"CUDA error {error}, {library.report()}" if error else ""


class Cuda:
    """A GPU, whose schedule is its own."""

    device = torch.device("cuda")

    @staticmethod
    @cache
    def library() -> ctypes.CDLL:
        return ctypes.CDLL(str(nvcc.build("probe", [SOURCE], "90a")))

    def call(self, name: str, seed: int, *arguments: object) -> str:
        """Run a probe; return what went wrong."""
        try:
            torch.cuda.synchronize()
            error = getattr(self.library(), f"probe_{name}")(*arguments)
            torch.cuda.synchronize()
        except RuntimeError as fault:
            return str(fault).partition("\n")[0]
        return f"CUDA error {error}" if error else ""


DEVICES = {"simt": Simt(), "cuda": Cuda()}


def difference(got: Tensor, expected: Tensor) -> str:
    """Return where numbers are not what they must be; empty if they are."""
    wrong = (got != expected).flatten().nonzero().flatten()
    if not len(wrong):
        return ""
    first = wrong[0]
    numbers = f"{got.flatten()[first].item()}, not {expected.flatten()[first].item()}"
    return f"{len(wrong)} of {got.numel()} numbers differ, the first at {first}: {numbers}"


def check_case(name: str, case: Case, device: Simt | Cuda, seed: int) -> str:
    """Return how one call disagrees with the manual; empty if it agrees."""
    input = case.input.to(device.device)
    if case.before is None:
        output = torch.empty_like(case.expected, device=device.device)
        output.view(torch.uint8).fill_(0xA5)
    else:
        output = case.before.to(device.device)
    pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (input, output))
    return device.call(name, seed, *pointers, *case.arguments) or difference(
        output.cpu(), case.expected
    )


def check(name: str, device: Simt | Cuda, seed: int = 0) -> str:
    """Return how a probe disagrees with the manual; empty if it agrees."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for case in PROBES[name]():
            if fault := check_case(name, case, device, seed):
                return f"{name}{case.arguments}: {fault}"
    return ""


def check_in_process(name: str) -> str:
    """Return the same for the GPU, from a process that can be ended."""
    command = [sys.executable, __file__, "--probe", name, "--device", "cuda"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return f"{name}: no end within {LIMIT} s"
    if done.returncode == 0:
        return ""
    said = [*done.stdout.splitlines()[-1:], *done.stderr.splitlines()[-3:]]
    return " | ".join([f"{name}: exit status {done.returncode}", *said])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--probe", choices=PROBES, help="only this one, in this process")
    parser.add_argument("--device", choices=DEVICES, required=True)
    options = parser.parse_args(argv)
    device = DEVICES[options.device]
    if options.probe:
        fault = check(options.probe, device)
        print(fault or f"{options.probe}: ok")
        return int(bool(fault))
    if missing := build.missing() if options.device == "simt" else nvcc.missing("90a"):
        print(f"probe: no {options.device}, {missing}")
        return 1
    device.library()  # once for all processes
    on_gpu = options.device == "cuda"
    with ThreadPoolExecutor(PROCESSES if on_gpu else 1) as pool:
        run = check_in_process if on_gpu else lambda name: check(name, device)
        faults = dict(zip(PROBES, pool.map(run, PROBES), strict=True))
    for name, fault in faults.items():
        print(f"{name:<19}{PROBES[name].__doc__:<66}{'DIFFERS' if fault else 'ok'}")
    wrong = list(filter(None, faults.values()))
    print(*wrong, f"{len(faults) - len(wrong)} of {len(faults)} probes agree", sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
