"""What `make gpu` runs, on a GPU or in rehearsal on the CPU: the same stages, other commands."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch

from environment import commit
from ledger import file_in
from registry import OPS
from stages import ROOT, Stage

PYTHON = sys.executable
FOLDER = ROOT / "tests"


@dataclass(frozen=True)
class Tests:
    """A stage of tests.

    Args:
        name: in the summary.
        words: that pytest selects by.
        where: files, or options that leave files out.
        limit: seconds.
    """

    name: str
    words: str
    where: tuple[str, ...]
    limit: float


TILES_FILE = "test_gemm_sm90_cuda.py"
PRODUCT_FILES = ("test_gemm*.py", "test_linear*.py", "test_nn*.py", "test_accumulate_grad*.py")
# Left out of LISTS: tests of this folder's programs and of the build.
OTHER_FILES = ("test_bench*.py", "test_cuda_check.py", "test_triton_check.py", "test_package.py")
ALL_BUT_PRODUCTS = tuple(f"--ignore-glob={name}" for name in (*PRODUCT_FILES, *OTHER_FILES))
OF_PRODUCTS = tuple(
    sorted({file.name for name in PRODUCT_FILES for file in FOLDER.glob(name)} - {TILES_FILE})
)
LISTS = Tests("tests lists", "cuda", ALL_BUT_PRODUCTS, 60)
PRODUCTS = Tests("tests products", "cuda", OF_PRODUCTS, 100)
TILES = Tests("tests sm_90", "cuda", (TILES_FILE,), 45)
# Need a GPU and are not parametrised by it: autocast's ops, and the products' baseline.
LIBRARY = Tests(
    "tests library",
    "on_a_gpu or test_fastest",
    ("test_autocast_registry.py", "test_bench_cublaslt.py"),
    40,
)
TRITON_LISTS = Tests("triton lists", "triton and not cuda", ALL_BUT_PRODUCTS, 90)
TRITON_PRODUCTS = Tests("triton products", "triton and not cuda", OF_PRODUCTS, 120)

PYTEST = (
    *(PYTHON, "-m", "pytest", "-p", "no:cacheprovider", "-p", "gpu_fault"),
    *("-v", "--tb=short", "--maxfail=40", "--continue-on-collection-errors"),
)

# racecheck, which does not know the asynchronous copies and products of Hopper, last.
SANITIZERS = (("memcheck", 90), ("synccheck", 40), ("racecheck", 60))

BENCHMARKS_S = 250  # seconds that are kept for them
# The most wanted first: op, more words for run.py, seconds.
BENCHMARKS = (
    ("unscale", "", 25),
    ("gemm", "--dtype bf16", 75),
    ("train", "", 45),
    ("norm", "", 20),
    ("cast", "", 20),
    ("check", "", 20),
    ("update", "", 20),
    ("gemm", "--dtype fp16", 60),
    ("linear", "", 40),
    ("scaler", "", 25),
    ("autocast", "", 25),
)
OTHERS_S = 20  # for any other op
SHORT = ("--seconds", "0.1", "--no-compile")

# With these a caller would have other kernels tested and measured.
CHOICES = ("AMP_EXT_BACKEND", "AMP_EXT_GEMM", "TRITON_INTERPRET")


@dataclass(frozen=True)
class Gpu:
    """The GPU that is present, and the files of one run on it.

    Args:
        ledger: the file that measurements are appended to; the other files lie beside it.
    """

    ledger: Path
    lib: ClassVar[Path] = ROOT / "build/gpu"  # where amp_ext is built
    device: ClassVar[str] = "cuda"
    processes: ClassVar[int] = 8  # of the tests

    @classmethod
    def of(cls, results: Path) -> Gpu:
        """With its ledger in a folder of all results."""
        return cls(file_in(results.resolve(), "cuda", cls.machine(), commit()))

    @classmethod
    def machine(cls) -> str:
        """What the folder of its ledger is called after."""
        return torch.cuda.get_device_name()

    @property
    def name(self) -> str:
        return self.machine()

    def environment(self) -> dict[str, str]:
        """Of all stages."""
        path = os.pathsep.join(filter(None, [str(self.lib), os.environ.get("PYTHONPATH")]))
        more = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1"}
        kept = {name: value for name, value in os.environ.items() if name not in CHOICES}
        return {**kept, **self.build_options(), **more}

    def build_options(self) -> dict[str, str]:
        arch = architecture(torch.cuda.get_device_capability())
        return {"FORCE_CUDA": "1", "TORCH_CUDA_ARCH_LIST": arch}

    def beside(self, suffix: str) -> Path:
        """A file of the ledger's name and another suffix."""
        return self.ledger.with_suffix(suffix)

    # ---- commands ------------------------------------------------------------------------------

    def build(self) -> list[str]:
        return [PYTHON, "setup.py", "build", "--build-lib", str(self.lib)]

    def tests(self, tests: Tests) -> list[str]:
        """By several processes where that is possible: one that is lost is replaced."""
        command = [*PYTEST, "-k", tests.words, *tests.where]
        if importlib.util.find_spec("xdist"):
            # With loadfile a test that ends its process would be run again and again.
            command += ["-n", str(self.processes), "--dist", "worksteal"]
        return command

    def probe(self) -> list[str]:
        """Of the GPU alone: what the executor says is known without one."""
        return [PYTHON, "tests/simt/probe/run.py", "--device", self.device]

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

    def stages(self, groups: Collection[str]) -> Iterator[Stage]:
        """The build, then those of some groups, the most wanted first.

        What comes before the benchmarks leaves them their time.

        Args:
            groups: "tests", "checks", "bench".
        """
        reserve = BENCHMARKS_S if "bench" in groups else 0
        yield Stage("build", self.build(), 240, reserve=reserve)
        for stage in (*self.before(reserve), *self.benchmarks()):
            if stage.group in groups:
                yield stage

    def before(self, reserve: float) -> Iterator[Stage]:
        """Tests and checks."""

        def of(tests: Tests) -> Stage:
            command, needs = self.tests(tests), ("pytest",)
            return Stage(tests.name, command, tests.limit, FOLDER, "tests", reserve, needs)

        def check(name: str, command: list[str], limit: float, **options: object) -> Stage:
            return Stage(name, command, limit, group="checks", reserve=reserve, **options)

        yield check("doctor", [PYTHON, "-m", "amp_ext"], 60, cwd=FOLDER)
        yield from map(of, (LISTS, PRODUCTS, TILES, LIBRARY))
        yield check("probe", self.probe(), 100)
        yield from map(of, (TRITON_LISTS, TRITON_PRODUCTS))
        for tool, limit in SANITIZERS:
            missing, advisory = self.without_sanitizer(), tool == "racecheck"
            yield check(tool, self.sanitizer(tool), limit, missing=missing, advisory=advisory)

    def benchmarks(self) -> Iterator[Stage]:
        for op, more, limit in benchmarks(OPS):
            name = f"bench {op} {more.removeprefix('--dtype ')}".strip()
            yield Stage(name, self.benchmark(op, more), limit, group="bench")


class Rehearsal(Gpu):
    """The CPU in the GPU's place: amp_ext as it is installed, a handful of tests, quick runs."""

    lib: ClassVar[Path] = ROOT / "build/rehearsal-lib"
    device: ClassVar[str] = "cpu"
    processes: ClassVar[int] = 2
    # In place of those that would be skipped, or take long.
    TESTS: ClassVar = {
        LISTS: ("found_inf_is_set_to_one_and_never_cleared and simt", "test_check_finite.py"),
        PRODUCTS: ("attention", "test_gemm_layouts.py"),
        TRITON_LISTS: ("growth_and_backoff and triton", "test_update_scale.py"),
        TRITON_PRODUCTS: ("fake_tensors", "test_triton_compile.py"),
    }
    CASES: ClassVar = {
        **dict.fromkeys(("unscale", "cast", "norm", "check"), "4000"),
        "gemm": "64^3",
        "train": "regression",
        "linear": "MLP",
        "scaler": "40 parameters, SGD",
        "update": "1 found_inf",
        "autocast": "mm, no grad",
    }

    @classmethod
    def machine(cls) -> str:
        return "rehearsal"

    @property
    def name(self) -> str:
        return "REHEARSAL on the CPU: no figure of it is a GPU's"

    def build_options(self) -> dict[str, str]:
        return {"FORCE_CPU": "1", "TRITON_INTERPRET": "1"}

    def build(self) -> list[str]:
        return [PYTHON, "bench/borrow_build.py", str(self.lib)]

    def tests(self, tests: Tests) -> list[str]:
        words, *where = self.TESTS.get(tests, (tests.words, *tests.where))
        return super().tests(replace(tests, words=words, where=tuple(where)))

    def probe(self) -> list[str]:
        return [PYTHON, "tests/simt/probe/run.py", "--device", "simt"]

    def benchmark(self, op: str, more: str) -> list[str]:
        few = ["--filter", self.CASES[op]] if op in self.CASES else []
        return [*super().benchmark(op, more), "--quick", *few]

    def without_sanitizer(self) -> str:
        return "a rehearsal has no GPU to watch"


def architecture(capability: tuple[int, int]) -> str:
    """The GPU's own, for TORCH_CUDA_ARCH_LIST: every kernel file is compiled for it or left out."""
    major, minor = capability
    return f"{major}.{minor}{'a' if major >= 9 else ''}"


def benchmarks(ops: Sequence[str]) -> Iterator[tuple[str, str, int]]:
    """Those of BENCHMARKS that there are, then the other ops."""
    yield from (entry for entry in BENCHMARKS if entry[0] in ops)
    listed = {op for op, *_ in BENCHMARKS}
    yield from ((op, "", OTHERS_S) for op in ops if op not in listed)
