"""Break places of amp_ext and csrc by rule; a test must fail.

    python tests/mutants/sources.py [--most N] [--seed N] [--tests DIR] [--only FILE]

The script copies the repository to build/mutants, with a switch in each place of a sample
(rules.py), and builds the copy once. All tests run once, to see which places each test reaches.
Then a fork of this process runs the tests that reach a place, with its switch on, up to the first
failure. The script prints a line for each mutant. Some survivors change nothing that a
program can see; others need more tests (--each), or tests that are left out here.
"""

import argparse
import contextlib
import mmap
import multiprocessing
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from rules import HEADER, MODULE, Mutant, mutants_of, switched

ROOT = Path(__file__).resolve().parents[2]
COPY = ROOT / "build/mutants"
SOURCES = ("amp_ext/scaler", "amp_ext/autocast", "amp_ext/optim")
SOURCES += ("csrc/bindings", "csrc/cpu")
NOT_BROKEN = {"cuda.cpp", "triton.cpp", "triton.h"}  # CPUs do not run them
LEFT_OUT = ["bench", "build", "cudasim", "docs", "probe", "trainers"]  # tests of other code
BUILT = re.compile(r"^(\.git|\.venv.*|build|dist)$|\.so$|\.pyc$|^_build_info\.py$")
PASSED, FAILED = 0, 64  # exit codes of forks; an exception of the script is 1
PATIENCE = 300  # seconds for a test with a mutant


def files(folder: Path) -> dict[Path, bytes]:
    """Return the files in a folder by their relative paths, without what was built."""
    tops = [path for path in folder.iterdir() if not BUILT.search(path.name)]
    paths = [path for top in tops for path in (top, *top.rglob("*"))]
    found = [path for path in paths if path.is_file() and not BUILT.search(path.name)]
    return {path.relative_to(folder): path.read_bytes() for path in found}


def sample(most: int, seed: int) -> list[Mutant]:
    """Return mutants of the sources, no two of which overlap."""
    found: list[Mutant] = []
    for path, data in sorted(files(ROOT).items()):
        if str(path).startswith(SOURCES) and path.name not in NOT_BROKEN:
            found += mutants_of(path, data.decode())
    random.Random(seed).shuffle(found)
    chosen: list[Mutant] = []
    for mutant in found:
        if len(chosen) < most and not any(map(mutant.overlaps, chosen)):
            chosen.append(mutant)
    return sorted(chosen)


def build(mutants: list[Mutant], tests: Path) -> None:
    """Copy the repository with its switches and the tests, and compile what has changed."""
    contents = {path: data for path, data in files(ROOT).items() if path.parts[0] != "tests"}
    contents |= {Path("tests", path): data for path, data in files(tests).items()}
    for path in {mutant.path for mutant in mutants}:
        numbered = [(i, m) for i, m in enumerate(mutants, 1) if m.path == path]
        contents[path] = switched(path, contents[path].decode(), numbered).encode()
    contents[Path("csrc/mutated.h")] = HEADER.encode()
    contents[Path("amp_ext/_mutated.py")] = MODULE.encode()
    COPY.mkdir(parents=True, exist_ok=True)
    old = files(COPY)
    for path in old.keys() - contents.keys():
        (COPY / path).unlink()
    for path, data in contents.items():
        if old.get(path) != data:  # ninja compiles what has changed
            (COPY / path).parent.mkdir(parents=True, exist_ok=True)
            (COPY / path).write_bytes(data)
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    with (COPY / "build.log").open("w") as log:
        subprocess.run(command, cwd=COPY, stdout=log, stderr=log, check=True)


class Hunt:
    """A plugin of pytest that runs the collected tests on each mutant."""

    def __init__(self, mutants: list[Mutant], only: str, each: int):
        self.mutants, self.only, self.each = mutants, only, each
        self.output = os.fdopen(os.dup(1), "w", buffering=1)  # pytest captures the other one
        # The mutant that is on, the test that runs, and a mark for each mutant that was reached.
        path = COPY / "mutants.bin"
        path.write_bytes(bytes(4 * (len(mutants) + 2)))
        with path.open("r+b") as file:
            self.shared = memoryview(mmap.mmap(file.fileno(), 0)).cast("i")
        os.environ["AMP_EXT_MUTANTS"] = str(path)
        self.has_failed = False
        self.by_fixtures: defaultdict[str, set[int]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.has_failed |= report.failed
        if report.when == "setup":  # for all tests of the file, as its fixtures may be
            self.by_fixtures[report.nodeid.partition("::")[0]] |= self.reached()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        imported = self.reached()
        tests = self.record(session.items)
        for number, mutant in enumerate(self.mutants, 1):
            if self.only and f"{mutant.name} caught" not in self.only:
                continue
            reaching = [item for item, reached in tests if number in reached]
            verdict = "is reached by imports only" if number in imported else "SURVIVED untested"
            if reaching:
                verdict = self.verdict(number, reaching)
            print(f"{mutant.name} {verdict}", file=self.output)
        return True

    def reached(self) -> set[int]:
        """Return the mutants that were reached since the last call."""
        found = {i for i in range(1, len(self.mutants) + 1) if self.shared[i + 1]}
        for i in found:
            self.shared[i + 1] = 0
        return found

    def run_test(self, items: list[pytest.Item], i: int) -> None:
        self.has_failed, self.shared[1] = False, i
        following = items[i + 1] if i + 1 < len(items) else None
        items[i].ihook.pytest_runtest_protocol(item=items[i], nextitem=following)

    def record(self, items: list[pytest.Item]) -> list[tuple[pytest.Item, set[int]]]:
        """Run all tests without a mutant.

        Return those that pass and the mutants that they reach: the fastest first, and one case of
        each test before the others.
        """
        path = COPY / "reached.pickle"

        def run() -> None:
            tests = []
            turns: Counter[str] = Counter()
            for i, item in enumerate(items):
                start = time.perf_counter()
                self.run_test(items, i)
                name = item.nodeid.partition("[")[0]
                turns[name] += 1
                tests.append((turns[name], time.perf_counter() - start, i, self.reached()))
                if self.has_failed:
                    print(f"{item.nodeid} fails without mutants", file=self.output)
                    tests.pop()
            path.write_bytes(pickle.dumps((sorted(tests), self.by_fixtures)))

        if self.fork(run):
            raise pytest.UsageError(f"{items[self.shared[1]].nodeid} ends the process")
        tests, by_fixtures = pickle.loads(path.read_bytes())
        return [
            (items[i], reached | by_fixtures[items[i].nodeid.partition("::")[0]])
            for _, _, i, reached in tests
        ]

    def verdict(self, number: int, reaching: list[pytest.Item]) -> str:
        """Run tests that reach a mutant until one fails."""
        chosen = reaching[: self.each]

        def run() -> None:
            for i in range(len(chosen)):
                signal.alarm(PATIENCE)
                self.run_test(chosen, i)
                if self.has_failed:
                    os._exit(FAILED)

        self.shared[0] = number
        code = self.fork(run)
        self.shared[0] = 0
        self.reached()
        test = chosen[self.shared[1]].nodeid
        if code == 1:
            raise pytest.UsageError(f"{test} stops the script")
        if code == PASSED:
            return f"SURVIVED {len(chosen)} of {len(reaching)} tests"
        how = {FAILED: "", -signal.SIGALRM: " by a hang"}.get(code, " by a crash")
        return f"caught{how}, 1 of {len(reaching)} tests: {test}"

    def fork(self, run: Callable[[], None]) -> int:
        """Return the exit code of a fork."""

        def start() -> None:
            os.setsid()
            run()
            os._exit(PASSED)  # without the end of pytest's session

        process = multiprocessing.get_context("fork").Process(target=start)
        process.start()
        process.join()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the programs that tests have started
        return process.exitcode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=300, help="mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", help="other tests")
    parser.add_argument("--only", type=Path, help="an earlier output: run what was caught then")
    parser.add_argument("--each", type=int, default=400, help="tests for a mutant")
    options = parser.parse_args()
    only = options.only.read_text() if options.only else ""
    mutants = sample(options.most, options.seed)
    build(mutants, options.tests.resolve())
    os.chdir(COPY)
    os.environ["PYTHONPATH"] = str(COPY)
    sys.path[:1] = [str(COPY), *sys.path[1:], sys.path[0]]  # processes of tests import this file
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    folders = sorted({path.parent.name for path in Path("tests").glob("*/test_*.py")})
    arguments = [f"tests/{name}" for name in folders if name not in LEFT_OUT]
    arguments += ["-m", "not full", "-k", "not triton", "--hypothesis-seed=0"]
    arguments += ["-p", "no:cacheprovider", "-p", "no:terminal", "-p", "no:faulthandler"]
    return pytest.main(arguments, [Hunt(mutants, only, options.each)])


if __name__ == "__main__":
    sys.exit(main())
