"""The ledger of measurements: one JSON object a line, one line a provider of a case.

Lines are only ever appended, and older ones lack keys that came later: `read` supplies these.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path

# Providers that are amp_ext: "amp_ext" is older than the choice of a backend.
OURS = frozenset({"amp_ext", "cpu", "cuda", "triton", "library"})

# What every record has, and its value where a line says nothing of it.
DEFAULTS: Mapping[str, object] = {
    "op": None,  # as on the command line of run.py
    "case": None,  # its name; "limit: ..." is the first row of a table
    "provider": None,
    "baseline": "torch",  # the provider that the ratio is to
    "p20_us": None,  # microseconds of one launch, at three percentiles
    "p50_us": None,
    "p80_us": None,
    "bytes": None,  # read plus written by one launch
    "gb_per_s": None,  # 1e9 of them a second, at p20
    "flops": None,  # floating-point operations of one launch
    "gflop_per_s": None,
    "parameters": None,  # served by one launch
    "calls": 1,  # that one launch consists of
    "ratio": None,  # the baseline's p20 over this one's; None for refused cases too
    "counted": True,  # whether the case enters the geometric mean
    "error": None,  # why there is no ratio
    "foreign_cores": None,  # held by other processes before the case
    "device": None,  # "cpu" or "cuda"
    "device_name": None,
    "driver": None,
    "cuda": None,
    "torch": None,
    "triton": None,
    "commit": None,
    "threads": None,
    "utc": None,  # ISO 8601
    "command": None,
}


def read(path: str | Path) -> list[dict]:
    """The records of a file, or of all .jsonl files below a folder, in order of name and line.

    Each has every key of DEFAULTS, and any other that its line has. Lines of a file that another
    program wrote to a folder (no "op" in them) are left out.

    Raises:
        FileNotFoundError: there is neither.
        ValueError: a line is not a JSON object, with file and line number.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no ledger at {path}")
    files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    return [record for file in files for record in _records(file)]


def _records(file: Path) -> Iterator[dict]:
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = dict(json.loads(line))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{file}:{number} is not a JSON object: {error}") from None
        if "op" in record:
            yield {**DEFAULTS, **record}


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


def append(path: str | Path, records: Iterable[Mapping[str, object]]) -> None:
    """Add one line a record; the file and its folder are made where they are not there yet."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
