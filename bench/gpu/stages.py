"""The stages of a longer run: commands, how each ended, and what it said."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[2]
LAST, CAUSES = 12, 30  # lines kept of a stage that failed
GRACE = 5  # seconds to end after an interrupt
# pytest's failures and crashes, compilers' errors, where in a test a process was ended, and cases
# of run.py that failed.
CAUSE = re.compile(r'\b(FAILED|ERROR)\b|crashed while|\berror: |File ".*/tests/|NO RATIO')
COUNTS = re.compile(
    r"\d+ (passed|failed|errors?|skipped|deselected)\b.* in |no tests ran|is well$|probes agree$"
)


class Status(Enum):
    OK = "ok"
    FAILED = "FAILED"
    FINDINGS = "findings"
    LEFT_OUT = "left out"


@dataclass(frozen=True)
class Result:
    """How a stage ended.

    Args:
        status: in a word.
        words: what went wrong, and what it counted.
        seconds: that it took; None where it did not run.
        tail: those of its lines that may say why.
    """

    status: Status
    words: str = ""
    seconds: float | None = None
    tail: tuple[str, ...] = ()


@dataclass
class Output:
    """What a stage says: shown, appended to a log, and partly kept.

    Args:
        log: of the whole run.
    """

    log: TextIO
    last: deque[str] = field(default_factory=lambda: deque(maxlen=LAST))
    causes: deque[str] = field(default_factory=lambda: deque(maxlen=CAUSES))

    def read(self, lines: Iterable[str]) -> None:
        for text in lines:
            line = text.rstrip()
            self.show(line)
            if line:
                self.last.append(line)
            if CAUSE.search(line):
                self.causes.append(line)

    def show(self, line: str) -> None:
        print(line, flush=True)
        self.log.write(f"{line}\n")

    def counts(self) -> list[str]:
        """The lines that say how many tests passed."""
        return [line.strip(" =") for line in list(self.last) if COUNTS.search(line)]

    def tail(self) -> tuple[str, ...]:
        last = list(self.last)
        return (*(line for line in list(self.causes) if line not in last), *last)


@dataclass(frozen=True)
class Stage:
    """A command and the seconds it may take.

    Args:
        name: in the summary.
        command: program and arguments.
        limit: seconds.
        cwd: where it runs.
        group: what it belongs to, for a choice of stages.
        reserve: seconds that later stages are to find.
        missing: why it has to be left out, if so.
        advisory: what it finds is reported and fails nothing.
    """

    name: str
    command: Sequence[str]
    limit: float
    cwd: Path = ROOT
    group: str = ""
    reserve: float = 0
    missing: str = ""
    advisory: bool = False

    def run(self, env: Mapping[str, str], left: float, output: Output) -> Result:
        """Run it in the seconds that are left, if it can run."""
        seconds = min(self.limit, left - self.reserve)
        if obstacle := self.missing or ("no time" if seconds <= 0 else ""):
            return Result(Status.LEFT_OUT, obstacle)
        output.show(f"== {self.name}: {' '.join(self.command)}")
        start = time.monotonic()
        fault = self.fault(env, seconds, output)
        took = time.monotonic() - start
        words = ": ".join([*filter(None, [fault]), *output.counts()])
        if not fault:
            return Result(Status.OK, words, took)
        status = Status.FINDINGS if self.advisory else Status.FAILED
        return Result(status, words, took, output.tail())

    def fault(self, env: Mapping[str, str], seconds: float, output: Output) -> str:
        """Run it for that long at most; return what went wrong, empty if nothing did."""
        try:
            process = subprocess.Popen(
                self.command,
                cwd=self.cwd,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
                preexec_fn=obey_interrupts,
            )
        except OSError as error:
            return f"it could not be started: {error}"
        reader = threading.Thread(target=output.read, args=(process.stdout,), daemon=True)
        reader.start()
        try:
            return exit_words(process.wait(seconds))
        except subprocess.TimeoutExpired:
            interrupt(process)
            return f"out of time after {seconds:.0f} s"
        finally:
            send(signal.SIGKILL, process)  # its children too: they would hold the GPU
            wait(process)
            reader.join(GRACE)


def obey_interrupts() -> None:
    """In a child: a job in the background inherits them as ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupt(process: subprocess.Popen) -> None:
    """Ask it to end, as Ctrl-C does: pytest then says what it has found so far."""
    send(signal.SIGINT, process)
    wait(process)


def wait(process: subprocess.Popen) -> None:
    """For a while: one that waits for its GPU may not even be killed."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)


def send(number: signal.Signals, process: subprocess.Popen) -> None:
    """Send a signal to a process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def exit_words(status: int) -> str:
    """ "exit status 3", or the signal that ended it; empty for success."""
    if status >= 0:
        return f"exit status {status}" if status else ""
    return f"killed by {signal.Signals(-status).name}"


class Summary:
    """What became of the stages, written to a file after each of them.

    What the file says already, of an earlier run of the same day and commit, stays above.

    Args:
        path: of the file.
        heading: its first line.
    """

    def __init__(self, path: Path, heading: str) -> None:
        self.path = path
        self.earlier = f"{path.read_text()}\n" if path.exists() else ""
        self.lines = [heading, ""]
        self.failed = False

    def note(self, stage: Stage, result: Result) -> str:
        """Add a stage; return its line."""
        line = f"{stage.name:<17}{result.status.value}"
        line += f", {result.words}" if result.words else ""
        line += "" if result.seconds is None else f" ({result.seconds:.0f} s)"
        self.lines += [line, *(f"    | {said[:160]}" for said in result.tail)]
        self.failed |= result.status is Status.FAILED
        self.write()
        return line

    def add(self, text: str) -> None:
        """Add a paragraph."""
        self.lines += ["", text]
        self.write()

    @property
    def text(self) -> str:
        return "\n".join(self.lines).rstrip() + "\n"

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(self.earlier + self.text)


def run_all(
    stages: Iterable[Stage], env: Mapping[str, str], end: float, summary: Summary, log: Path
) -> None:
    """One after the other, until the monotonic clock reads `end`; all they say goes to the log."""
    with log.open("a", buffering=1) as file:
        for stage in stages:
            output = Output(file)
            start = time.monotonic()
            try:
                result = stage.run(env, end - start, output)
            except (KeyboardInterrupt, SystemExit):
                took = time.monotonic() - start
                summary.note(stage, Result(Status.FAILED, "interrupted", took, output.tail()))
                raise
            output.show(f"== {summary.note(stage, result)}\n")
