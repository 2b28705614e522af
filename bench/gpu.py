"""Build, test, check and measure on a GPU, in ten minutes: `make gpu`.

    python bench/gpu.py [--only tests|checks|bench] [--budget SECONDS] [--dry-run] RESULTS

The run builds amp_ext for the GPU and the torch at hand, and downloads nothing. "tests" are `pytest
-m gpu`, "checks" self-verification, the hardware probe and compute-sanitizer. "bench" is run.py: it
appends to RESULTS/<gpu>/<utc date>-<commit>.jsonl; .log and .summary.txt lie beside it. A stage
that fails or cannot run leaves the others running; the exit status is 1 if one has failed.
AMP_EXT_COMMIT names the commit of a copy without its repository. --dry-run rehearses the run on the
fake CUDA runtime: `make gpu DRY_RUN=1`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from harness import page
from harness.ledger import commit, file_in
from harness.registry import OPS

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
GROUPS = ("tests", "checks", "bench")
BUDGET, BENCHMARKS_S, GRACE = 540, 250, 5  # seconds: of all, of run.py, to end after an interrupt
PYTHON = sys.executable
LIBRARIES = ("build/gpu", "build/rehearsal-lib")  # the second one for a dry run
# Words for run.py and seconds, the most wanted first; other ops have 20 s in the middle.
FIRST = {"unscale": 25, "gemm --dtype=bf16": 75, "train": 45}
LAST = {"gemm --dtype=fp16": 60, "linear": 40, "scaler": 25, "autocast": 25}
NAMED = {words.split()[0] for words in (*FIRST, *LAST)}
BENCHMARKS = {**FIRST, **{op: 20 for op in OPS if op not in NAMED}, **LAST}
# Small cases for the rehearsal; other ops run their cases with "2 x 10".
SMALL = {"gemm": "64^3", "train": "regression", "linear": "1/32", "update_scale": ""}
SMALL |= {"scaler": "40 parameters, SGD", "autocast": "mm, no grad", "step": "clipped, BF16"}
# Variables that would change the tested and measured kernels.
CHOICES = ("AMP_EXT_BACKEND", "AMP_EXT_GEMM", "AMP_EXT_VERIFY", "TRITON_INTERPRET")
# Failed tests, compilers' errors, where a test was ended, and failed cases of run.py.
CAUSE = re.compile(r'\b(FAILED|ERROR)\b|crashed while|\berror: |File ".*/tests/|NO RATIO')
COUNTS = re.compile(r"\d+ (passed|failed|errors?|skipped)\b.* in |no tests ran|is well$|agree$")


@dataclass(frozen=True)
class Stage:
    """Describe a command."""

    name: str
    command: Sequence[str]
    limit: float  # seconds
    group: str = ""  # one of GROUPS, or empty for the build
    cwd: Path = ROOT
    missing: str = ""  # why the stage is left out
    advisory: bool = False  # findings fail nothing


def stages(ledger: Path, dry: bool) -> list[Stage]:
    """Return the stages of a run or of its rehearsal, the most wanted of each group first."""
    made = [Stage("build", [PYTHON, "setup.py", "build", "--build-lib", LIBRARIES[dry]], 240)]
    made.append(Stage("doctor", [PYTHON, "-m", "amp_ext"], 120, "checks", TESTS))
    pytest = [PYTHON, "-m", "pytest", "-p", "no:cacheprovider", "-p", "gpu_fault", "-m", "gpu"]
    pytest += ["-v", "--tb=short", "--maxfail=40", "--continue-on-collection-errors"]
    if importlib.util.find_spec("xdist"):
        # loadfile would repeat a test that ends its process again and again.
        pytest += ["-n", "2" if dry else "8", "--dist", "worksteal"]
    pytest += ["--tests", "12"] if dry else []
    missing = "" if importlib.util.find_spec("pytest") else "pytest is not installed"
    made.append(Stage("tests", [*pytest, "-k", "not triton"], 200, "tests", TESTS, missing))
    triton = "the fake runtime runs no Triton kernels" if dry else missing
    made.append(Stage("tests of Triton", [*pytest, "-k", "triton"], 150, "tests", TESTS, triton))

    made.append(Stage("probe", [PYTHON, "tests/probe/run.py"], 100, "checks"))
    absent = "a rehearsal has no GPU to watch" if dry else "compute-sanitizer is not installed"
    missing = "" if shutil.which("compute-sanitizer") and not dry else absent
    for tool, limit in (("memcheck", 90), ("synccheck", 40), ("racecheck", 60)):
        # racecheck does not support Hopper's asynchronous copies and products.
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1", PYTHON]
        command.append("tests/support/small_case.py")
        made.append(Stage(tool, command, limit, "checks", ROOT, missing, tool == "racecheck"))
    for words, limit in BENCHMARKS.items():
        command = [PYTHON, "bench/run.py", *words.split(), "--device=cuda", "--json", str(ledger)]
        command += ["--seconds=0.1"]
        command += ["--quick", "--filter", SMALL.get(words.split()[0], "2 x 10")] if dry else []
        name = f"bench {words.replace('--dtype=', '')}"
        made.append(Stage(name, command, limit, "bench", advisory=dry))
    return made


def environment(dry: bool) -> dict[str, str]:
    """Return the environment of all stages, without the caller's choice of kernels."""
    paths = [ROOT / LIBRARIES[dry], ROOT / "bench", TESTS / "support", os.environ.get("PYTHONPATH")]
    kept = {name: value for name, value in os.environ.items() if name not in CHOICES}
    more = {"FORCE_CUDA": "1", "PYTHONUNBUFFERED": "1"}
    more["PYTHONPATH"] = os.pathsep.join(str(path) for path in paths if path)
    if not dry:  # its own architecture: every kernel file is compiled for it or left out
        major, minor = torch.cuda.get_device_capability()
        more["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}{'a' if major >= 9 else ''}"
    return {**kept, **more}


class Report:
    """Print and log all lines, and append a summary to earlier ones."""

    def __init__(self, path: Path, heading: str) -> None:
        self.path, self.failed, self.lines = path, False, []
        self.log = path.with_suffix("").with_suffix(".log").open("a", buffering=1)
        self.text = f"{path.read_text()}\n" if path.exists() else ""
        self.add(heading, "")

    def say(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # of a terminal that was closed
            print(line, flush=True)
        self.log.write(f"{line}\n")

    def read(self, stream: Iterable[str]) -> None:
        for line in map(str.rstrip, stream):
            self.say(line)
            self.lines += [line] if line else []

    def add(self, *lines: str) -> None:
        self.text += "".join(f"{line}\n" for line in lines)
        self.path.write_text(self.text)

    def note(self, name: str, status: str) -> None:
        """Add a stage with its status, and after a fault the lines that may explain it."""
        self.failed |= status.startswith("FAILED")
        causes = [line for line in self.lines[:-12] if CAUSE.search(line)][-30:] + self.lines[-12:]
        causes = [] if status.startswith(("ok", "left out")) else causes
        self.add(f"{name:<17}{status}", *(f"    | {line[:160]}" for line in causes))
        self.say(f"== {name:<17}{status}\n")


def run(stage: Stage, env: dict[str, str], seconds: float, report: Report) -> str:
    """Run a stage for that long at most; return its fault, empty without one."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "errors": "replace"}
    obey = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a background job ignores it
    options |= {"cwd": stage.cwd, "env": env, "start_new_session": True, "preexec_fn": obey}
    try:
        process = subprocess.Popen(stage.command, text=True, **options)
    except OSError as error:
        return f"it could not be started: {error}"
    reader = threading.Thread(target=report.read, args=(process.stdout,), daemon=True)
    reader.start()
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        end(process, signal.SIGINT)  # pytest and run.py then print their results
        return f"out of time after {seconds:.0f} s"
    finally:
        end(process, signal.SIGKILL)  # its children too: they would hold the GPU
        reader.join(GRACE)
    words = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return words if status else ""


def end(process: subprocess.Popen, number: signal.Signals) -> None:
    """Signal a process and its children; one that waits for its GPU may survive."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)


def run_all(chosen: Sequence[Stage], env: dict, deadline: float, report: Report) -> None:
    """Run the stages until the monotonic clock reads `deadline`; run.py's time is reserved."""
    reserve = BENCHMARKS_S if any(stage.group == "bench" for stage in chosen) else 0
    for stage in chosen:
        report.lines, start = [], time.monotonic()
        seconds = min(stage.limit, deadline - start - (stage.group != "bench") * reserve)
        if obstacle := stage.missing or ("no time" if seconds <= 0 else ""):
            report.note(stage.name, f"left out, {obstacle}")
            continue
        report.say(f"== {stage.name}: {' '.join(stage.command)}")
        fault = "interrupted"
        try:
            fault = run(stage, env, seconds, report)
        finally:
            status = "ok" if not fault else "findings" if stage.advisory else "FAILED"
            counts = [line.strip(" =") for line in report.lines[-12:] if COUNTS.search(line)]
            words = ": ".join(filter(None, [fault, *counts]))
            took = time.monotonic() - start
            report.note(stage.name, f"{status}{', ' if words else ''}{words} ({took:.0f} s)")


def table(ledger: Path) -> list[str]:
    """Return the geometric mean, the worst and the best ratio of each op and backend."""
    if not ledger.exists():
        return ["nothing was measured"]
    try:
        machines = page.newest(ledger, quick=True)
    except ValueError as error:  # its last line was cut off
        return [f"no table: {error}"]
    rows = [row for runs in machines.values() for run in runs for row in page.table(run)]
    return [", ".join(page.COLUMNS), *(", ".join(filter(None, row)) for row in rows)]


def main(argv: Sequence[str] | None = None) -> int:
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, help="a folder")
    parser.add_argument("--only", choices=GROUPS, help="after the build")
    parser.add_argument("--budget", type=float, default=BUDGET, metavar="S", help="seconds, or 540")
    parser.add_argument("--dry-run", action="store_true", help="on the fake CUDA runtime")
    options = parser.parse_args(argv)
    dry = options.dry_run
    if dry != ("FAKE_CUDA_KERNELS" in os.environ):
        parser.error("--dry-run is for tests/fake_cuda/run.py, which needs it")
    if not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} of {PYTHON} sees no GPU")
    machine = "rehearsal" if dry else torch.cuda.get_device_name()
    ledger = file_in(options.results.resolve(), "cuda", machine, commit())
    ledger.parent.mkdir(parents=True, exist_ok=True)
    name = "REHEARSAL on tests/fake_cuda: no figure of it is a GPU's" if dry else machine
    report = Report(ledger.with_suffix(".summary.txt"), f"{name}, torch {torch.__version__}")
    groups = ("", *([options.only] if options.only else GROUPS))
    chosen = [stage for stage in stages(ledger, dry) if stage.group in groups]
    try:
        run_all(chosen, environment(dry), start + options.budget, report)
    finally:
        report.add("", *table(ledger))
    print(f"\n{report.text}", end="")
    return int(report.failed)


def stop(number: int, frame: object) -> None:
    """End as Ctrl-C does: no stage is left running, and the table is written."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    sys.exit(main())
