"""Break the CUDA kernels, one edit at a time, and see that their tests on the executor fail.

    python tests/simt/mutants/run.py [part of a name or a file...]

Prints a table. The exit status is 1 when a mutant survives, an edit does not apply or a mutant does
not compile.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from simt.build import BUILD, HERE, KERNELS, build, few_sources
from simt.forks import Done, Forks
from simt.mutants import gemm_sm80, gemm_sm80_epilogue, gemm_sm90, lists, optim
from simt.mutants.mutant import Mutant
from simt.sanitize import environment

TESTS = HERE.parent
MUTANTS: tuple[Mutant, ...] = (
    *lists.MUTANTS,
    *optim.MUTANTS,
    *gemm_sm80.MUTANTS,
    *gemm_sm80_epilogue.MUTANTS,
    *gemm_sm90.MUTANTS,
)
LONGEST_S = 300
IDLE: defaultdict[str, list[Forks]] = defaultdict(list)  # variant -> those that run no tests


def build_few(variant: str, kernels: Path = KERNELS, into: Path = BUILD) -> Path:
    return build(variant, "few", few_sources(kernels), kernels, into)


def applies(mutant: Mutant) -> bool:
    text = (KERNELS / mutant.file).read_text()
    return text.count(mutant.old) == 1 and mutant.old != mutant.new


def run_tests(mutant: Mutant, library: Path, limit_s: int) -> Done:
    """Run the tests that have to fail, on a library."""
    select = f"simt and ({mutant.select})" if mutant.select else "simt"
    options = ("-xqsp", "no:cacheprovider", "--disable-warnings", "-k", select)
    (file,) = TESTS.rglob(f"test_{mutant.tests}.py")
    idle = IDLE[mutant.variant]
    forks = idle.pop() if idle else Forks(environment(mutant.variant))
    try:
        return forks.pytest(library, limit_s, *options, str(file))
    finally:
        idle.append(forks)


def control(mutant: Mutant) -> float:
    """Return how long the tests take on the kernels as they are, where they have to pass."""
    done = run_tests(mutant, build_few(mutant.variant), LONGEST_S)
    if done.status or " passed" not in done.output:
        raise RuntimeError(f"the tests fail without an edit: {done.output[-500:]}")
    return done.seconds


CAUGHT = ("1 failed", "1 error", "ERROR: AddressSanitizer", "runtime error:", "data race")


def tested(mutant: Mutant, control_s: Future[float], folder: Path) -> tuple[bool, str]:
    """Return whether the mutant was caught, and how."""
    if not applies(mutant):
        return False, "THE EDIT DOES NOT APPLY"
    kernels = folder / "kernels"
    shutil.copytree(KERNELS, kernels)
    text = (kernels / mutant.file).read_text()
    (kernels / mutant.file).write_text(text.replace(mutant.old, mutant.new))
    try:
        limit_s = max(10, round(5 * control_s.result()))
        library = build_few(mutant.variant, kernels, folder)
    except RuntimeError as error:
        return False, f"NOT BUILT: {error}"
    done = run_tests(mutant, library, limit_s)
    if done.hung:
        return True, f"hangs for {done.seconds:.0f} s"
    if done.status in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGFPE):
        return True, f"ends by signal {-done.status}"
    if done.status <= 0 or not any(sign in done.output for sign in CAUGHT):
        return False, f"SURVIVES (exit status {done.status})"
    for line in done.output.splitlines():
        if line.startswith(("E   ", "WARNING: ThreadSanitizer")):
            return True, line.removeprefix("E").rpartition(" returned CUDA error ")[2].strip()
    return True, f"exit status {done.status}"


def run(mutant: Mutant, control_s: Future[float]) -> bool:
    """Test a mutant and print its line of the table."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        caught, how = tested(mutant, control_s, Path(folder))
    seconds = time.monotonic() - start
    print(f"{mutant.file:22} {mutant.name:52} {seconds:4.0f} s  {how[:90]}", flush=True)
    return caught


def main(names: list[str]) -> int:
    chosen = [
        mutant
        for mutant in MUTANTS
        if not names or any(name in f"{mutant.file} {mutant.name}" for name in names)
    ]
    jobs = int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))
    with ThreadPoolExecutor(jobs) as pool:
        controls: dict[tuple[str, ...], Future[float]] = {}
        for mutant in chosen:
            key = (mutant.tests, mutant.select, mutant.variant)
            if key not in controls:
                controls[key] = pool.submit(control, mutant)
        runs = [
            pool.submit(run, mutant, controls[mutant.tests, mutant.select, mutant.variant])
            for mutant in chosen
        ]
        caught = [one.result() for one in runs]
    print(f"{sum(caught)} of {len(caught)} mutants were caught")
    return int(not all(caught))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
