"""What `make gpu` runs, on a GPU or in rehearsal on the CPU: the same stages, other commands."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from registry import OPS
from stages import ROOT, Stage

PYTHON = sys.executable
TESTS = ROOT / "tests"
SANITIZERS = ("memcheck", "racecheck", "synccheck")
BENCHMARKS_S, PLOTS_S = 250, 25  # seconds that are kept for them
# The most wanted first: op, more words for run.py, seconds.
BENCHMARKS = (
    ("unscale", "", 25),
    ("gemm", "--dtype bf16", 75),
    ("train", "", 45),
    ("gemm", "--dtype fp16", 60),
    ("linear", "", 40),
    ("norm", "", 20),
    ("cast", "", 20),
    ("check", "", 20),
    ("scaler", "", 25),
    ("autocast", "", 25),
)
OTHERS_S = 20  # for any other op


@dataclass
class Gpu:
    """The GPU that is present, and the files of one run on it.

    Args:
        ledger: the file that measurements are appended to; the other files lie beside it.
        lib: where amp_ext is built.
    """

    ledger: Path
    lib: Path = ROOT / "build/gpu"
    device: str = "cuda"
    budget: float = 570  # seconds, for all stages

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name()

    def environment(self) -> dict[str, str]:
        """Of all stages."""
        path = os.pathsep.join(filter(None, [str(self.lib), os.environ.get("PYTHONPATH")]))
        more = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1"}
        return {**os.environ, **self.build_options(), **more}

    def build_options(self) -> dict[str, str]:
        arches = arch_list(torch.cuda.get_device_capability())
        return {"FORCE_CUDA": "1", "TORCH_CUDA_ARCH_LIST": arches}

    def beside(self, suffix: str) -> Path:
        """A file of the ledger's name and another suffix."""
        return self.ledger.with_suffix(suffix)

    # ---- commands ------------------------------------------------------------------------------

    def build(self) -> list[str]:
        return [PYTHON, "setup.py", "build", "--build-lib", str(self.lib)]

    def tests(self, executor: str) -> list[str]:
        """All tests of an executor but the demonstrations."""
        words = {"cuda": "cuda", "triton": "triton and not cuda"}[executor]
        # Apart: they may hang, or spoil the process for the others.
        return [*PYTEST, "-q", "-k", words, "--ignore", DEMONSTRATIONS, "."]

    def demonstrations(self) -> list[str]:
        return [*PYTEST, "-v", "-x", "-k", "cuda", DEMONSTRATIONS]

    def probe(self) -> list[str]:
        return [PYTHON, str(ROOT / "bench/probe.py"), "--save", str(self.beside(".probe.txt"))]

    def sanitizer(self, tool: str) -> list[str]:
        small = [PYTHON, "bench/small_case.py", "--device", self.device]
        return ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1", *small]

    def without_sanitizer(self) -> str:
        found = shutil.which("compute-sanitizer")
        return "" if found else "compute-sanitizer is not installed"

    def benchmark(self, op: str, more: str) -> list[str]:
        """Short, and without torch.compile, which alone would take minutes."""
        where = ["--device", self.device, "--json", str(self.ledger)]
        return [PYTHON, "bench/run.py", op, *where, *more.split(), *SHORT]

    # ---- stages --------------------------------------------------------------------------------

    def stages(self) -> Iterator[Stage]:
        """The most wanted first; what comes before the benchmarks leaves them their time."""
        later = BENCHMARKS_S + PLOTS_S
        yield Stage("build", self.build(), 240, reserve=later)
        yield Stage("doctor", [PYTHON, "-m", "amp_ext"], 60, TESTS, reserve=later)
        needs = ("pytest",)
        for executor, limit in (("cuda", 120), ("triton", 90)):
            command = self.tests(executor)
            yield Stage(f"tests {executor}", command, limit, TESTS, later, needs)
        yield Stage("probe", self.probe(), 60, reserve=later)
        yield Stage("demonstrations", self.demonstrations(), 45, TESTS, later, needs)
        for tool in SANITIZERS:
            # racecheck does not know the asynchronous copies and products of Hopper.
            advisory, missing = tool == "racecheck", self.without_sanitizer()
            command = self.sanitizer(tool)
            yield Stage(tool, command, 40, reserve=later, missing=missing, advisory=advisory)
        for op, more, limit in benchmarks(OPS):
            name = f"bench {op} {more.removeprefix('--dtype ')}".strip()
            yield Stage(name, self.benchmark(op, more), limit, reserve=PLOTS_S)
        history = ["bench/history.py", "--device", self.device, "--json", str(self.ledger)]
        yield Stage("history", [PYTHON, *history], 45)
        folder = str(self.ledger.parent)
        plot = ["bench/plot.py", "--results", str(self.ledger), "--out", folder, "--formats", "png"]
        yield Stage("plots", [PYTHON, *plot], 60, needs=("matplotlib",))


class Rehearsal(Gpu):
    """The CPU in the GPU's place: amp_ext as it is installed, a handful of tests, quick runs."""

    FEW = "test_found_inf_is_set_to_one_and_never_cleared or test_backoff"
    CASES: ClassVar = {
        **dict.fromkeys(("unscale", "cast", "norm", "check"), "4000"),
        "gemm": "64^3",
        "train": "regression",
        "linear": "MLP",
        "scaler": "40 parameters, SGD",
        "update": "1 found_inf",
        "autocast": "mm, no grad",
    }

    @property
    def name(self) -> str:
        return "REHEARSAL on the CPU: no figure of it is a GPU's"

    def build_options(self) -> dict[str, str]:
        return {"FORCE_CPU": "1", "TRITON_INTERPRET": "1"}

    def build(self) -> list[str]:
        return [PYTHON, "bench/borrow_build.py", str(self.lib)]

    def tests(self, executor: str) -> list[str]:
        stand_in = {"cuda": "simt", "triton": "triton"}[executor]
        files = ["test_check_finite.py", "test_update_scale.py"]
        return [*PYTEST, "-q", "-k", f"({self.FEW}) and {stand_in}", *files]

    def demonstrations(self) -> list[str]:
        return [*PYTEST, "-v", "-x", "--collect-only", "-q", "-k", "cuda", DEMONSTRATIONS]

    def benchmark(self, op: str, more: str) -> list[str]:
        few = ["--filter", self.CASES[op]] if op in self.CASES else []
        return [*super().benchmark(op, more), "--quick", *few]

    def without_sanitizer(self) -> str:
        return "a rehearsal has no GPU to watch"


PYTEST = [
    *(PYTHON, "-m", "pytest", "-p", "no:cacheprovider"),
    *("-o", "faulthandler_timeout=60", "--continue-on-collection-errors"),
]
SHORT = ("--seconds", "0.1", "--no-compile")
DEMONSTRATIONS = "test_simt_kernels.py"


def arch_list(capability: tuple[int, int]) -> str:
    """The GPU's own architecture, and 8.0 for the kernels that are written for all of them."""
    major, minor = capability
    own = f"{major}.{minor}{'a' if major >= 9 else ''}"
    return own if own == "8.0" else f"8.0;{own}"


def benchmarks(ops: Sequence[str]) -> Iterator[tuple[str, str, int]]:
    """Those of BENCHMARKS that there are, then the other ops."""
    yield from (entry for entry in BENCHMARKS if entry[0] in ops)
    listed = {op for op, *_ in BENCHMARKS}
    yield from ((op, "", OTHERS_S) for op in ops if op not in listed)
