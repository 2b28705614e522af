"""A command of a longer run: its time, what it needs, and what it said last."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KEPT = 12  # last lines of a stage that failed
GRACE = 5  # seconds to end after an interrupt
ENDS = re.compile(r"\d+ (passed|failed|errors?|skipped|deselected)\b.* in |no tests ran|is well$")


@dataclass
class Stage:
    """A command and the seconds it may take.

    Args:
        name: in the summary.
        command: program and arguments.
        limit: seconds.
        cwd: where it runs.
        reserve: seconds that later stages are to find.
        needs: Python modules without which it is left out.
        missing: another reason to leave it out.
        advisory: what it finds is reported and fails nothing.
    """

    name: str
    command: list[str]
    limit: float
    cwd: Path = ROOT
    reserve: float = 0
    needs: tuple[str, ...] = ()
    missing: str = ""
    advisory: bool = False
    said: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT), repr=False)

    def run(self, env: dict[str, str], left: float) -> str:
        """Run it in the seconds that are left; return how it ended, its time and its last word."""
        if reason := self.missing or self.absent():
            return f"left out, {reason}"
        seconds = min(self.limit, left - self.reserve)
        if seconds <= 0:
            return "left out, no time"
        print(f"== {self.name}: {' '.join(map(str, self.command))}", flush=True)
        start = time.monotonic()
        try:
            result = self.ended(env, seconds)
        except OSError as error:
            result = f"FAILED, it could not be started: {error}"
        if self.advisory:
            result = result.replace("FAILED", "findings")
        result += f" ({time.monotonic() - start:.0f} s)"
        result += "".join(f": {line.strip(' =')}" for line in list(self.said) if ENDS.search(line))
        print(f"== {self.name}: {result}", flush=True)
        return result

    def absent(self) -> str:
        """Which of the modules it needs are not installed."""
        names = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not installed" * bool(
            names
        )

    def ended(self, env: dict[str, str], seconds: float) -> str:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        run = subprocess.Popen(
            self.command,
            cwd=self.cwd,
            env=env,
            start_new_session=True,
            text=True,
            errors="replace",
            **pipes,
        )
        reader = threading.Thread(target=self.listen, args=(run,), daemon=True)
        reader.start()
        try:
            status = run.wait(seconds)
            result = f"FAILED, {exit_words(status)}" if status else "ok"
        except subprocess.TimeoutExpired:
            result = f"FAILED, out of time after {seconds:.0f} s"
            self.end(run)
        finally:
            kill(run.pid)  # its children too: they would hold the GPU
            run.wait()
            reader.join(GRACE)
        return result

    def listen(self, run: subprocess.Popen) -> None:
        for line in run.stdout:
            print(line, end="", flush=True)
            if line.strip():
                self.said.append(line.rstrip())

    def end(self, run: subprocess.Popen) -> None:
        """Ask it to end, as Ctrl-C does: pytest then says what it has found so far."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(GRACE)


def kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def exit_words(status: int) -> str:
    """ "exit status 3", or the signal that ended it."""
    if status >= 0:
        return f"exit status {status}"
    return f"killed by {signal.Signals(-status).name}"


@dataclass
class Summary:
    """What became of the stages, written to a file after each of them.

    Args:
        path: of the file.
        heading: its first line.
    """

    path: Path
    heading: str
    lines: list[str] = field(default_factory=list)
    failed: bool = False

    def note(self, stage: Stage, result: str) -> None:
        self.lines.append(f"{stage.name:<17}{result}")
        if result.startswith(("FAILED", "findings")):
            self.failed |= result.startswith("FAILED")
            self.lines += [f"    | {line}" for line in stage.said]
        self.write()

    def write(self, table: str = "") -> None:
        text = "\n".join([self.heading, "", *self.lines, *([""] * bool(table)), table]).rstrip()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(text + "\n")


def run_all(stages: list[Stage], env: dict[str, str], budget: float, summary: Summary) -> None:
    """One after the other, until the budget's seconds are over."""
    end = time.monotonic() + budget
    for stage in stages:
        try:
            result = stage.run(env, end - time.monotonic())
        except KeyboardInterrupt:
            summary.note(stage, "FAILED, interrupted")
            raise
        summary.note(stage, result)
