"""Run a program of Python in a process of its own."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path


def run(
    *command: str, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments, such as "-c" and code, and more variables of the environment."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def run_with(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the packages of a folder, where no other import can supply amp_ext.

    -S leaves out the finder of an editable install.
    """
    return run("-S", *command, cwd=folder, PYTHONPATH=os.pathsep.join([str(folder), *sys.path]))


def output(code: str, *arguments: str, **variables: str) -> str:
    """Return what a program prints; assert that it succeeds."""
    done = run("-c", textwrap.dedent(code), *arguments, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout
