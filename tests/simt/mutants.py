"""Break the CUDA kernels, one edit at a time, and see that their tests on the executor fail.

    python tests/simt/mutants.py [part of a name or a file...]

Prints a table. The exit status is 1 when a mutant survives, an edit does not apply or a mutant does
not compile.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from simt import mutants_of_demos, mutants_of_gemm, mutants_of_gemm_sm90, mutants_of_ops
from simt.build import BUILD, HERE, KERNELS, build
from simt.mutant import Mutant
from simt.sanitize import environment

TESTS = HERE.parent
LONGEST_S = 300


@dataclass(frozen=True)
class Suite:
    """Kernels that are broken together with their tests.

    Attributes:
        folder: of the kernels.
        build: makes a library of a variant from another folder of kernels, kept in a third.
        mutants: of these kernels.
    """

    folder: Path
    build: Callable[[str, Path, Path], Path]
    mutants: tuple[Mutant, ...]


def build_ops(variant: str, kernels: Path, into: Path) -> Path:
    return build(variant, kernels=kernels, into=into)


def build_gemm_sm90(variant: str, kernels: Path, into: Path) -> Path:
    sources = [HERE / "gemm_sm90_few.cu", TESTS / "simt_gemm.cpp"]
    return build(variant, "gemm_sm90", sources, kernels, into)


def build_demos(variant: str, kernels: Path, into: Path) -> Path:
    sources = sorted(kernels.glob("*.cu"))
    return build(variant, "demos", sources, into=into)


SUITES = (
    Suite(KERNELS, build_ops, (*mutants_of_ops.MUTANTS, *mutants_of_gemm.MUTANTS)),
    Suite(KERNELS, build_gemm_sm90, mutants_of_gemm_sm90.MUTANTS),
    Suite(HERE / "kernels", build_demos, mutants_of_demos.MUTANTS),
)


def applies(suite: Suite, mutant: Mutant) -> bool:
    text = (suite.folder / mutant.file).read_text()
    return text.count(mutant.old) == 1 and mutant.old != mutant.new


def run_tests(mutant: Mutant, library: Path, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run the tests that have to fail, on a library."""
    pytest = (sys.executable, "-m", "pytest", "-xqsp", "no:cacheprovider")
    select = f"simt and ({mutant.select})" if mutant.select else "simt"
    return subprocess.run(
        [*pytest, "-k", select, str(TESTS / f"test_{mutant.tests}.py")],
        env=environment(mutant.variant) | {"AMP_EXT_SIMT_LIBRARY": str(library)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


class Controls:
    """That the tests pass on the kernels as they are, and how long they take."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, ...], float] = {}
        self._lock = Lock()

    def seconds(self, suite: Suite, mutant: Mutant) -> float:
        """Return the time; raise RuntimeError where they fail."""
        key = (mutant.tests, mutant.select, mutant.variant)
        with self._lock:
            if key not in self._seconds:
                library = suite.build(mutant.variant, suite.folder, BUILD)
                start = time.monotonic()
                done = run_tests(mutant, library, LONGEST_S)
                if done.returncode or " passed" not in done.stdout:
                    raise RuntimeError(f"the tests fail without an edit: {done.stdout[-500:]}")
                self._seconds[key] = time.monotonic() - start
            return self._seconds[key]


CONTROLS = Controls()
CAUGHT = ("1 failed", "1 error", "ERROR: AddressSanitizer", "runtime error:", "data race")


def judge(suite: Suite, mutant: Mutant, folder: Path) -> tuple[bool, str]:
    """Return whether the mutant was caught, and how."""
    if not applies(suite, mutant):
        return False, "THE EDIT DOES NOT APPLY"
    kernels = folder / "kernels"
    shutil.copytree(suite.folder, kernels)
    text = (kernels / mutant.file).read_text()
    (kernels / mutant.file).write_text(text.replace(mutant.old, mutant.new))
    try:
        limit = max(60.0, 5 * CONTROLS.seconds(suite, mutant))
        library = suite.build(mutant.variant, kernels, folder)
    except RuntimeError as error:
        return False, f"NOT JUDGED: {error}"
    try:
        done = run_tests(mutant, library, limit)
    except subprocess.TimeoutExpired:
        return True, f"hangs for {limit:.0f} s"
    output = done.stdout + done.stderr
    if done.returncode in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGFPE):
        return True, f"ends by signal {-done.returncode}"
    if done.returncode <= 0 or not any(sign in output for sign in CAUGHT):
        return False, f"SURVIVES (exit status {done.returncode})"
    for line in output.splitlines():
        if line.startswith(("E   ", "WARNING: ThreadSanitizer")):
            return True, line.removeprefix("E").rpartition(" returned CUDA error ")[2].strip()
    return True, f"exit status {done.returncode}"


def run(suite: Suite, mutant: Mutant) -> bool:
    """Judge a mutant and print its line of the table."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        caught, verdict = judge(suite, mutant, Path(folder))
    seconds = time.monotonic() - start
    print(f"{mutant.file:22} {mutant.name:52} {seconds:4.0f} s  {verdict[:90]}", flush=True)
    return caught


def main(names: list[str]) -> int:
    chosen = [
        (suite, mutant)
        for suite in SUITES
        for mutant in suite.mutants
        if not names or any(name in f"{mutant.file} {mutant.name}" for name in names)
    ]
    jobs = int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))
    with ThreadPoolExecutor(jobs) as pool:
        caught = list(pool.map(lambda pair: run(*pair), chosen))
    print(f"{sum(caught)} of {len(caught)} mutants were caught")
    return int(not all(caught))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
