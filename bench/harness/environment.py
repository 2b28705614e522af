"""What every line of the ledger says of the machine, the software and the commit."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from pathlib import Path

import torch

HERE = Path(__file__).parent
COMMIT = "AMP_EXT_COMMIT"  # names the commit where the files are a copy without its repository


def describe(device: torch.device, command: str) -> dict[str, object]:
    """The keys of a ledger's line that are the same for all of a run.

    Args:
        device: that is measured.
        command: that measures.
    """
    import amp_ext
    from amp_ext._triton import triton_version

    on_gpu = device.type == "cuda"
    return {
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        "driver": driver() if on_gpu else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton_version(),
        # Installed outside of its repository it says nothing of its own.
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


def driver() -> str | None:
    """The version of NVIDIA's driver."""
    words = _words_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return words.splitlines()[0] if words else None


@functools.cache
def commit(folder: Path = HERE) -> str | None:
    """The commit that a folder's repository is at, "-dirty" with local changes.

    Without one, what the environment variable AMP_EXT_COMMIT says; else None.
    """
    words = _words_of("git", "-C", str(folder), "describe", "--always", "--dirty")
    return words or os.environ.get(COMMIT)


def _words_of(*command: str) -> str | None:
    """What a command prints, or None where it fails."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip() or None
