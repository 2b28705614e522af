"""Break places of amp_ext and csrc by rule; a test must fail.

    python tests/mutants/sources.py [--most N] [--seed N] [--tests DIR] [--only FILE]

The script copies the repository to build/mutants, with a switch in each place of a sample
(rules.py), and builds the copy once. All tests run once, to see which places each test reaches.
Then a fork of this process runs the tests that reach a place, with its switch on, up to the first
failure. The script prints a line for each mutant. Some survivors change nothing that a program can
see; others need more processor time (--seconds), or tests that are left out here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from rules import HEADER, MODULE, Mutant, mutants_of, switched

ROOT = Path(__file__).resolve().parents[2]
COPY = ROOT / "build/mutants"
SOURCES = ["amp_ext/scaler", "amp_ext/autocast", "amp_ext/optim", "amp_ext/nn.py"]
SOURCES += ["csrc/bindings", "csrc/cpu"]
# Files that CPUs do not run.
NOT_BROKEN = {"cuda.cpp", "triton.cpp", "triton.h"}
# Folders of tests, where their names differ.
TESTS_OF = {"nn.py": "gemm", "checks": "lists", "isa": "lists", "params": "scaler"}
LEFT_OUT = ["bench", "build", "cudasim", "docs", "probe", "trainers"]  # tests of other code
BUILT = re.compile(r"^(\.git|\.venv.*|build|dist)$|\.so$|\.pyc$|^_build_info\.py$")
PASSED, FAILED, OUT_OF_TIME = 0, 64, 65  # exit codes of forks; an exception of the script is 1


def files(*folders: Path) -> dict[Path, bytes]:
    """Return the files in folders by their relative paths, without what was built."""
    paths = [(top.parent, path) for top in folders for path in (top, *top.rglob("*"))]
    paths = [(root, path) for root, path in paths if path.is_file() and not BUILT.search(path.name)]
    return {path.relative_to(root): path.read_bytes() for root, path in paths}


def sources() -> dict[Path, bytes]:
    return files(*(path for path in ROOT.iterdir() if not BUILT.search(path.name)))


def sample(most: int, seed: int) -> list[Mutant]:
    """Return mutants of the sources, no two of which overlap."""
    found: list[Mutant] = []
    for path, data in sorted(sources().items()):
        if str(path).startswith(tuple(SOURCES)) and path.name not in NOT_BROKEN:
            found += mutants_of(path, data.decode())
    random.Random(seed).shuffle(found)
    chosen: list[Mutant] = []
    for mutant in found:
        if len(chosen) < most and not any(map(mutant.overlaps, chosen)):
            chosen.append(mutant)
    return sorted(chosen)


def build(mutants: list[Mutant], tests: Path) -> None:
    """Copy the repository with its switches and the tests, and compile what has changed."""
    contents = {path: data for path, data in sources().items() if path.parts[0] != "tests"}
    for path, data in files(tests).items():
        contents[Path("tests", path.relative_to(tests.name))] = data
    for path in {mutant.path for mutant in mutants}:
        numbered = [(i, m) for i, m in enumerate(mutants, 1) if m.path == path]
        contents[path] = switched(path, contents[path].decode(), numbered).encode()
    contents[Path("csrc/mutated.h")] = HEADER.encode()
    contents[Path("amp_ext/_mutated.py")] = MODULE.encode()
    COPY.mkdir(parents=True, exist_ok=True)
    old = files(*(path for path in COPY.iterdir() if path.name != "build"))
    for path in old.keys() - contents.keys():
        (COPY / path).unlink()
    for path, data in contents.items():
        if old.get(path) != data:  # ninja compiles what has changed
            (COPY / path).parent.mkdir(parents=True, exist_ok=True)
            (COPY / path).write_bytes(data)
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    with (COPY / "build.log").open("w") as log:
        subprocess.run(command, cwd=COPY, stdout=log, stderr=log, check=True)


class Test(NamedTuple):
    """A test that passes without mutants, the time of its slowest case, and what it reaches."""

    item: pytest.Item
    seconds: float
    reached: set[int]


def function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


class Hunt:
    """A plugin of pytest that runs the collected tests on each mutant."""

    def __init__(self, mutants: list[Mutant], only: str, seconds: float):
        self.mutants, self.only, self.seconds = mutants, only, seconds
        self.output = os.fdopen(os.dup(1), "w", buffering=1)  # pytest captures the other one
        # The mutant that is on, the test that runs, and a mark for each mutant that was reached.
        path = COPY / "mutants.bin"
        path.write_bytes(bytes(4 * (len(mutants) + 2)))
        with path.open("r+b") as file:
            self.shared = memoryview(mmap.mmap(file.fileno(), 0)).cast("i")
        os.environ["AMP_EXT_MUTANTS"] = str(path)
        self.has_failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.has_failed |= report.failed
        if report.when == "setup":
            self.reached_by_fixtures = self.reached()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        imported = self.reached()
        tests = self.record(session.items)
        for number, mutant in enumerate(self.mutants, 1):
            if self.only and f"{mutant.name} caught" not in self.only:
                continue
            reaching = [test for test in tests if number in test.reached]
            verdict = "is reached by imports only" if number in imported else "SURVIVED untested"
            if reaching:
                verdict = self.verdict(number, reaching)
            print(f"{mutant.name} {verdict}", file=self.output)
        return True

    def reached(self) -> list[int]:
        """Return the mutants that were reached since the last call."""
        found = [i for i in range(1, len(self.mutants) + 1) if self.shared[i + 1]]
        for i in found:
            self.shared[i + 1] = 0
        return found

    def run_test(self, items: list[pytest.Item], i: int) -> None:
        self.has_failed, self.shared[1] = False, i
        following = items[i + 1] if i + 1 < len(items) else None
        items[i].ihook.pytest_runtest_protocol(item=items[i], nextitem=following)

    def record(self, items: list[pytest.Item]) -> list[Test]:
        """Run all tests without a mutant."""
        path = COPY / "reached.jsonl"

        def run() -> None:
            with path.open("w") as file:
                for i, item in enumerate(items):
                    start = time.perf_counter()
                    self.run_test(items, i)
                    seconds, reached = time.perf_counter() - start, self.reached()
                    if self.has_failed:
                        print(f"{item.nodeid} fails without mutants", file=self.output)
                    else:
                        row = [i, seconds, self.reached_by_fixtures, reached]
                        print(json.dumps(row), file=file)

        if self.fork(run):
            raise pytest.UsageError(f"{items[self.shared[1]].nodeid} ends the process")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        # The first test of a file may set up fixtures for all of them.
        slowest: dict[str, float] = defaultdict(float)
        shared: dict[Path, set[int]] = defaultdict(set)
        for i, seconds, by_fixtures, _ in rows:
            slowest[function(items[i])] = max(seconds, slowest[function(items[i])])
            shared[items[i].path].update(by_fixtures)
        tests = [
            Test(items[i], slowest[function(items[i])], shared[items[i].path].union(found))
            for i, _, _, found in rows
        ]
        return sorted(tests, key=lambda test: test.seconds)

    def verdict(self, number: int, reaching: list[Test]) -> str:
        """Run the tests that reach a mutant until one fails; one case of each test comes first."""
        place = self.mutants[number - 1].path.parts
        folder = place[1] if place[0] == "amp_ext" else place[2]
        own = f"tests/{TESTS_OF.get(folder, folder)}/"
        turns = Counter()

        def order(test: Test) -> tuple[bool, int, bool]:
            turns[function(test.item)] += 1
            return test.seconds > 1, turns[function(test.item)], own not in test.item.nodeid

        chosen = [test.item for test in sorted(reaching, key=order)]

        def run() -> None:
            end = processor_seconds() + self.seconds
            for i in range(len(chosen)):
                if processor_seconds() > end:
                    os._exit(OUT_OF_TIME)
                self.run_test(chosen, i)
                if self.has_failed:
                    os._exit(FAILED)

        self.shared[0] = number
        code = self.fork(run, patience=60 + 5 * max(test.seconds for test in reaching))
        if code == 1:
            raise pytest.UsageError(f"{chosen[self.shared[1]].nodeid} stops the script")
        self.shared[0] = 0
        self.reached()
        if code in (PASSED, OUT_OF_TIME):
            count = len(chosen) if code == PASSED else self.shared[1] + 1
            return f"SURVIVED {count} of {len(chosen)} tests"
        how = {FAILED: "", -signal.SIGKILL: " by a hang"}.get(code, " by a crash")
        return f"caught{how}, 1 of {len(chosen)} tests: {chosen[self.shared[1]].nodeid}"

    def fork(self, run: Callable[[], None], patience: float = 600) -> int:
        """Return the exit code of a fork, which a signal ends if a test takes too long."""

        def start() -> None:
            os.setsid()
            run()
            os._exit(PASSED)  # without the end of pytest's session

        test, self.shared[1] = None, -1
        process = multiprocessing.get_context("fork").Process(target=start)
        process.start()
        while process.is_alive() and test != self.shared[1]:
            test = self.shared[1]
            process.join(patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the programs that tests have started
        process.join()
        return process.exitcode


def processor_seconds() -> float:
    return sum(os.times()[:4])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=300, help="mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", help="other tests")
    parser.add_argument("--only", type=Path, help="an earlier output: run what was caught then")
    parser.add_argument("--seconds", type=float, default=60, help="of processors, for a mutant")
    options = parser.parse_args()
    only = options.only.read_text() if options.only else ""
    mutants = sample(options.most, options.seed)
    build(mutants, options.tests.resolve())
    os.chdir(COPY)
    os.environ["PYTHONPATH"] = str(COPY)
    sys.path[:1] = [str(COPY), *sys.path[1:], sys.path[0]]  # processes of tests import this file
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    folders = sorted(path.parent.name for path in Path("tests").glob("*/test_*.py"))
    arguments = [f"tests/{name}" for name in dict.fromkeys(folders) if name not in LEFT_OUT]
    arguments += ["-m", "not full", "-k", "not ptx and not triton", "--hypothesis-seed=0"]
    arguments += ["-p", "no:cacheprovider", "-p", "no:terminal", "-p", "no:faulthandler"]
    return pytest.main(arguments, [Hunt(mutants, only, options.seconds)])


if __name__ == "__main__":
    sys.exit(main())
