"""Run pytest in forks of a process that has imported torch, which takes longer than most tests."""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

IDLE_S = 300  # a test that sleeps is stopped after this


class Done(NamedTuple):
    """How pytest ended: its exit status or minus a signal's number, and the processor's time."""

    status: int
    output: str
    seconds: float

    @property
    def hung(self) -> bool:
        return self.status in (-signal.SIGXCPU, -signal.SIGALRM)


class Forks:
    """A process, with an environment of its own, that runs one pytest at a time."""

    def __init__(self, environment: dict[str, str]) -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(
            command, env=environment, stdin=pipe, stdout=pipe, text=True
        )

    def pytest(self, library: Path, limit_s: int, *arguments: str) -> Done:
        """Run tests on a library, for at most `limit_s` seconds of the processor's time."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests and answers
        with tempfile.NamedTemporaryFile("r", errors="replace") as output:
            print(json.dumps([str(library), limit_s, output.name, arguments]), file=requests)
            requests.flush()
            status, seconds = json.loads(answers.readline())
            return Done(status, output.read(), seconds)


def _serve() -> None:
    for module in ("hypothesis", "pytest", "torch"):
        importlib.import_module(module)
    sys.modules["torch"].use_deterministic_algorithms(False)  # as conftest: it imports a lot
    gc.freeze()
    for request in sys.stdin:
        child = os.fork()
        if not child:
            _test(*json.loads(request))
        _, status, used = os.wait4(child, 0)
        seconds = used.ru_utime + used.ru_stime
        print(json.dumps([os.waitstatus_to_exitcode(status), seconds]), flush=True)


def _test(library: str, limit_s: int, output: str, arguments: list[str]) -> None:
    signal.alarm(IDLE_S)
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 5))
    file = os.open(output, os.O_WRONLY)
    os.dup2(file, sys.stdout.fileno())
    os.dup2(file, sys.stderr.fileno())
    os.environ["AMP_EXT_SIMT_LIBRARY"] = library
    status = sys.modules["pytest"].main(arguments)
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    _serve()
    os._exit(0)  # without what torch would say of its own end
