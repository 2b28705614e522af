"""Run a program of Python in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments, such as "-c" and code, and more variables of the environment."""
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def output(code: str, *arguments: str, **variables: str) -> str:
    """Return what a program prints; assert that it succeeds."""
    done = run("-c", textwrap.dedent(code), *arguments, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout
