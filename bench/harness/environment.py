"""Describe the machine, the software and the commit for each line of the ledger."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from pathlib import Path

import torch

HERE = Path(__file__).parent
COMMIT = "AMP_EXT_COMMIT"  # names the commit of files that were copied without their repository


def describe(device: torch.device, command: str) -> dict[str, object]:
    """Return the keys of a ledger's line that are the same for all of a run."""
    import amp_ext
    from amp_ext._triton import triton_version

    on_gpu = device.type == "cuda"
    driver = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        "driver": driver.splitlines()[0] if on_gpu and driver else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton_version(),
        # An amp_ext installed outside of its repository has no commit of its own.
        "commit": commit(Path(amp_ext.__file__).parent) or commit(HERE),
        "command": command,
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


@functools.cache
def commit(folder: Path = HERE) -> str | None:
    """Return a repository's commit, "-dirty" with local changes, else AMP_EXT_COMMIT."""
    words = _output_of("git", "-C", str(folder), "describe", "--always", "--dirty")
    return words or os.environ.get(COMMIT)


def _output_of(*command: str) -> str | None:
    """Return a command's output; None where the command fails."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip() or None
