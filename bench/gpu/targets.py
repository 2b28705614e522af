"""What `make gpu` runs, on a GPU or in rehearsal on the fake CUDA runtime: the same stages."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from gpu.stages import ROOT, Stage
from harness.environment import commit
from harness.ledger import file_in
from harness.registry import OPS

PYTHON = sys.executable
FOLDER = ROOT / "tests"
PROBE = "tests/probe/run.py"  # of what tests/cudasim assumes of a GPU
PYTEST = (
    *(PYTHON, "-m", "pytest", "-p", "no:cacheprovider", "-p", "gpu.gpu_fault"),
    *("-v", "--tb=short", "--maxfail=40", "--continue-on-collection-errors"),
)


@dataclass(frozen=True)
class Tests:
    """A stage of tests.

    Args:
        name: in the summary.
        words: that pytest selects by.
        files: a pattern of their names; `others` are all that no pattern matches.
        limit: seconds.
    """

    name: str
    words: str
    files: str
    limit: float


NOT_OF_A_GPU = r"(bench|build|cudasim|probe)/|test_(bench|cuda_check|triton_check|package)"
TILES = "sm90_cuda"
PRODUCTS = r"test_(gemm|linear|nn)|bench/test_cublaslt"
OTHERS = ""
ON_GPU, BY_TRITON = "cuda or on_a_gpu", "triton and not cuda"
TESTS = (
    Tests("tests lists", ON_GPU, OTHERS, 80),
    Tests("tests products", ON_GPU, PRODUCTS, 120),
    Tests("tests sm_90", ON_GPU, TILES, 45),
)
TRITON_TESTS = (
    Tests("triton lists", BY_TRITON, OTHERS, 90),
    Tests("triton products", BY_TRITON, PRODUCTS, 120),
)


def files(pattern: str) -> list[str]:
    """The test files of a stage, each of which is in one stage or NOT_OF_A_GPU."""
    found: dict[str, list[str]] = {TILES: [], PRODUCTS: [], NOT_OF_A_GPU: [], OTHERS: []}
    for path in sorted(FOLDER.rglob("test_*.py")):
        name = path.relative_to(FOLDER).as_posix()
        found[next(each for each in found if re.search(each, name))].append(name)
    return found[pattern]


# racecheck, which does not know the asynchronous copies and products of Hopper, last.
SANITIZERS = (("memcheck", 90), ("synccheck", 40), ("racecheck", 60))

BENCHMARKS_S = 250  # seconds that are kept for them
# The most wanted first: op, more words for run.py, seconds. The ops on lists are in the middle.
WANTED = (("unscale", "", 25), ("gemm", "--dtype bf16", 75), ("train", "", 45))
LAST = (
    ("gemm", "--dtype fp16", 60),
    *(("linear", "", 40), ("scaler", "", 25), ("autocast", "", 25)),
)
_NAMED = {op for op, *_ in WANTED + LAST}
BENCHMARKS = (*WANTED, *((op, "", 20) for op in OPS if op not in _NAMED), *LAST)
SHORT = ("--seconds", "0.1", "--no-compile")

# With these a caller would have other kernels tested and measured.
CHOICES = ("AMP_EXT_BACKEND", "AMP_EXT_GEMM", "AMP_EXT_VERIFY", "TRITON_INTERPRET")


@dataclass(frozen=True)
class Gpu:
    """The GPU that is present, and the files of one run on it.

    Args:
        ledger: the file that measurements are appended to; the other files lie beside it.
    """

    ledger: Path
    lib: ClassVar[Path] = ROOT / "build/gpu"  # where amp_ext is built
    device: ClassVar[str] = "cuda"
    measures: ClassVar[bool] = True

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
        paths = [str(self.lib), str(ROOT / "bench"), os.environ.get("PYTHONPATH")]
        path = os.pathsep.join(filter(None, paths))
        more = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1"}
        kept = {name: value for name, value in os.environ.items() if name not in CHOICES}
        return {**kept, **self.build_options(), **more}

    def build_options(self) -> dict[str, str]:
        arch = architecture(torch.cuda.get_device_capability())
        return {"FORCE_CUDA": "1", "TORCH_CUDA_ARCH_LIST": arch}

    # ---- commands ------------------------------------------------------------------------------

    def tests(self, tests: Tests) -> list[str]:
        """By several processes where that is possible: one that is lost is replaced."""
        command = [*PYTEST, "-k", tests.words, *files(tests.files)]
        if importlib.util.find_spec("xdist"):
            # With loadfile a test that ends its process would be run again and again.
            command += ["-n", "8", "--dist", "worksteal"]
        return command

    def without_tests(self, tests: Tests) -> str:
        return "" if importlib.util.find_spec("pytest") else "pytest is not installed"

    def probe(self) -> list[str]:
        """Of the GPU alone: what the executor says is known without one."""
        return [PYTHON, PROBE, "--device", self.device]

    def sanitizer(self, tool: str) -> list[str]:
        small = [PYTHON, "bench/gpu/small_case.py", "--device", self.device]
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
        build = [PYTHON, "setup.py", "build", "--build-lib", str(self.lib)]
        yield Stage("build", build, 240, reserve=reserve)
        for stage in (*self.before(reserve), *self.benchmarks()):
            if stage.group in groups:
                yield stage

    def before(self, reserve: float) -> Iterator[Stage]:
        """Tests and checks."""

        def of(tests: Tests) -> Stage:
            command, lacking = self.tests(tests), self.without_tests(tests)
            return Stage(tests.name, command, tests.limit, FOLDER, "tests", reserve, lacking)

        def check(name: str, command: list[str], limit: float, **options: object) -> Stage:
            return Stage(name, command, limit, group="checks", reserve=reserve, **options)

        yield check("verify", [PYTHON, "-m", "amp_ext", "verify"], 60, cwd=FOLDER)
        yield check("doctor", [PYTHON, "-m", "amp_ext"], 60, cwd=FOLDER)
        yield from map(of, TESTS)
        yield check("probe", self.probe(), 100)
        yield from map(of, TRITON_TESTS)
        for tool, limit in SANITIZERS:
            missing, advisory = self.without_sanitizer(), tool == "racecheck"
            yield check(tool, self.sanitizer(tool), limit, missing=missing, advisory=advisory)

    def benchmarks(self) -> Iterator[Stage]:
        for op, more, limit in BENCHMARKS:
            name = f"bench {op} {more.removeprefix('--dtype ')}".strip()
            command = self.benchmark(op, more)
            yield Stage(name, command, limit, group="bench", advisory=not self.measures)


class Rehearsal(Gpu):
    """The fake CUDA runtime of tests/fake_cuda in the GPU's place: a few tests, the probe on the
    executor, benchmarks of small cases, and no sanitizers."""

    lib: ClassVar[Path] = ROOT / "build/rehearsal-lib"
    measures: ClassVar[bool] = False  # Triton and cuBLASLt have no ratios there
    CASES: ClassVar = {
        "gemm": "64^3",
        "train": "regression",
        "linear": "MLP",
        "scaler": "40 parameters, SGD",
        "autocast": "mm, no grad",
        "update_scale": "",
    }

    @classmethod
    def machine(cls) -> str:
        return "rehearsal"

    @property
    def name(self) -> str:
        return "REHEARSAL on tests/fake_cuda: no figure of it is a GPU's"

    def build_options(self) -> dict[str, str]:
        return {"FORCE_CUDA": "1"}  # as make cuda-check

    def tests(self, tests: Tests) -> list[str]:
        return [word if word != "8" else "2" for word in super().tests(tests)] + ["--tests", "12"]

    def without_tests(self, tests: Tests) -> str:
        if tests in TRITON_TESTS:
            return "the fake runtime runs no Triton kernels"
        return "products of a size that takes the executor hours" if tests.files == TILES else ""

    def probe(self) -> list[str]:
        return [PYTHON, PROBE, "--device", "ptx"]

    def benchmark(self, op: str, more: str) -> list[str]:
        return [*super().benchmark(op, more), "--quick", "--filter", self.CASES.get(op, "2 x 10 ")]

    def without_sanitizer(self) -> str:
        return "a rehearsal has no GPU to watch"


def architecture(capability: tuple[int, int]) -> str:
    """The GPU's own, for TORCH_CUDA_ARCH_LIST: every kernel file is compiled for it or left out."""
    major, minor = capability
    return f"{major}.{minor}{'a' if major >= 9 else ''}"
