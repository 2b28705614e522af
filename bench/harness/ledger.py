"""Append measurements to ledgers, one JSON object a line, and read them.

A line is one provider of a case. Lines are only ever appended.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TypedDict

import torch

OURS = ("cpu", "cuda", "triton", "library")  # providers that are amp_ext
FP32_LINE = "fp32"  # the provider that is torch in FP32
HERE = Path(__file__).parent
COMMIT = "AMP_EXT_COMMIT"  # names the commit of files that were copied without their repository


class Record(TypedDict):
    """Type a line with every key, and None for an absent value."""

    op: str  # as on the command line of run.py
    case: str  # its name
    limit: bool  # whether the line is the first row of a table
    dtype: str | None  # "fp16", "bf16" or "fp32", if all operands have the same
    provider: str
    baseline: str  # the provider that the ratio is to
    p20_us: float | None  # microseconds of one launch, at three percentiles; None: it did not run
    p50_us: float | None
    p80_us: float | None
    bytes: int | None  # to read and to write in one launch
    gb_per_s: float | None  # 1e9 bytes a second, at p20
    flops: int | None  # floating-point operations of one launch
    gflop_per_s: float | None
    parameters: int | None  # of the optimizer that a step updates
    calls: int  # in one launch
    ratio: float | None  # the baseline's p20 over this line's; None for refused cases too
    counted: bool  # whether the case enters the geometric mean
    error: str | None  # why there is no ratio
    device: str  # "cpu" or "cuda"
    device_name: str
    driver: str | None
    cuda: str | None
    torch: str
    triton: str | None
    commit: str | None
    threads: int
    utc: str  # ISO 8601
    command: str


# Keys that lines of GPUs may have besides: medians by triton.testing.
BENCH_KEYS = ("do_bench_us", "cudagraph_us")


def read(path: str | Path) -> list[Record]:
    """Return the lines of a file, or of all .jsonl files below a folder, by name and line.

    Raises:
        FileNotFoundError: nothing is at the path.
        ValueError: a line is no JSON object, or lacks a key; with file and line number.
    """
    return [record for file in files(path) for record in _lines(file)]


def files(path: str | Path) -> list[Path]:
    """Return the ledgers at a path, or raise FileNotFoundError."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no ledger at {path}")
    return sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]


def _lines(file: Path) -> Iterator[Record]:
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = dict(json.loads(line))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{file}:{number} is not a JSON object: {error}") from None
        if missing := Record.__annotations__.keys() - record:
            raise ValueError(f"{file}:{number} lacks {', '.join(sorted(missing))}: measure again")
        yield record


def file_in(folder: Path, device: str, name: str, commit: str | None) -> Path:
    """Return FOLDER/<device>/<utc date>-<commit>.jsonl, the ledger of a run."""
    words = re.sub(r"[^\w.]+", "-", name).strip("-").lower()
    words = words if device == "cuda" else f"{device}-{words}"
    return folder / words / f"{datetime.now(timezone.utc):%Y-%m-%d}-{commit or 'unknown'}.jsonl"


def append(path: str | Path, records: Iterable[Record]) -> None:
    """Add one line a record; make the file and its folder first."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


# ---- the keys that are the same for all of a run -----------------------------------------------


def describe(device: torch.device, command: str) -> dict[str, object]:
    """Return what a line says of the machine, the software, the commit and the command."""
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
