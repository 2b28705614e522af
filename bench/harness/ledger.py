"""The ledger of measurements: one JSON object a line, one line a provider of a case.

Lines are only ever appended.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TypedDict

OURS = frozenset({"cpu", "cuda", "triton", "library"})  # providers that are amp_ext
FP32_LINE = "fp32"  # the provider that is torch in FP32


class Record(TypedDict):
    """A line: it has every key, None where there is nothing to say."""

    op: str  # as on the command line of run.py
    case: str  # its name
    limit: bool  # whether it is the first row of a table
    dtype: str | None  # "fp16", "bf16" or "fp32", where its operands are of one
    provider: str
    baseline: str  # the provider that the ratio is to
    p20_us: float | None  # microseconds of one launch, at three percentiles; None: it did not run
    p50_us: float | None
    p80_us: float | None
    bytes: int | None  # that one launch has to read plus those that it has to write
    gb_per_s: float | None  # 1e9 of them a second, at p20
    flops: int | None  # floating-point operations of one launch
    gflop_per_s: float | None
    parameters: int | None  # of the optimizer that a step updates
    calls: int  # that one launch consists of
    ratio: float | None  # the baseline's p20 over this one's; None for refused cases too
    counted: bool  # whether the case enters the geometric mean
    error: str | None  # why there is no ratio
    foreign_cores: float | None  # held by other processes before the case
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


def read(path: str | Path) -> list[Record]:
    """The lines of a file, or of all .jsonl files below a folder, in order of name and line.

    Raises:
        FileNotFoundError: there is neither.
        ValueError: a line is not a JSON object, or lacks a record's key; with file and line number.
    """
    return [record for file in files(path) for record in _lines(file)]


def files(path: str | Path) -> list[Path]:
    """The ledgers at a path, which may be one: FileNotFoundError where there is nothing."""
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
    """FOLDER/<device>/<utc date>-<commit>.jsonl, where a run's measurements belong.

    Args:
        folder: of all results.
        device: "cpu" or "cuda".
        name: the device's name.
        commit: that was measured; None where it is unknown.
    """
    words = re.sub(r"[^\w.]+", "-", name).strip("-").lower()
    words = words if device == "cuda" else f"{device}-{words}"
    return folder / words / f"{datetime.now(timezone.utc):%Y-%m-%d}-{commit or 'unknown'}.jsonl"


def append(path: str | Path, records: Iterable[Record]) -> None:
    """Add one line a record; the file and its folder are made where they are not there yet."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
