"""The ledger of measurements: one JSON object a line, one line a provider of a case.

Lines are only ever appended; `read` brings older ones up to date.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path

OURS = frozenset({"cpu", "cuda", "triton", "library"})  # providers that are amp_ext
FP32_LINE = "fp32"  # the provider that is torch in FP32
HISTORY = "history"  # the kind of history.py's lines

# What every record has, and its value where a line says nothing of it.
DEFAULTS: Mapping[str, object] = {
    "op": None,  # as on the command line of run.py
    "case": None,  # its name
    "limit": False,  # whether it is the first row of a table
    "dtype": None,  # "fp16", "bf16" or "fp32", where its operands are of one
    "provider": None,
    "baseline": "torch",  # the provider that the ratio is to
    "p20_us": None,  # microseconds of one launch, at three percentiles; None where it did not run
    "p50_us": None,
    "p80_us": None,
    "bytes": None,  # that one launch has to read plus those that it has to write
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
    """The measurements of a file, or of all .jsonl files below a folder, in order of name and line.

    Each has every key of DEFAULTS, and any other that its line has.

    Raises:
        FileNotFoundError: there is neither.
        ValueError: a line is not a JSON object, with file and line number.
    """
    return [_modern(record) for file in files(path) for record in _lines(file) if "op" in record]


def histories(path: str | Path) -> list[tuple[str, dict]]:
    """history.py's lines, likewise, each with the name of its file's folder."""
    return [
        (file.parent.name, record)
        for file in files(path)
        for record in _lines(file)
        if record.get("kind") == HISTORY
    ]


def files(path: str | Path) -> list[Path]:
    """The ledgers at a path, which may be one: FileNotFoundError where there is nothing."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no ledger at {path}")
    return sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]


def _lines(file: Path) -> Iterator[dict]:
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            yield dict(json.loads(line))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{file}:{number} is not a JSON object: {error}") from None


def _modern(line: Mapping[str, object]) -> dict:
    """A measurement as it would be written now, whatever its age.

    Older lines call amp_ext's CPU backend amp_ext, know neither commands, limits nor dtypes, and
    say in a case's name what its label says now.
    """
    record = {**DEFAULTS, **line}
    if record["provider"] == "amp_ext":
        record["provider"] = "cpu"
    record["command"] = record["command"] or shlex.join(
        ["python", "bench/run.py", str(record["op"]), "--device", str(record["device"])]
    )
    name = str(record["case"])
    if name.startswith("limit: "):
        record |= {"case": name.removeprefix("limit: "), "limit": True}
    if name.endswith((" (not counted)", " (to fp32)")):
        record |= {"case": name.rpartition(" (")[0], "counted": False}
    if name.endswith(" (to fp32)"):
        record["baseline"] = FP32_LINE
    if "dtype" not in line:
        record["case"] = _renamed(record)
        words = re.split(r"\W+", str(record["case"]))
        dtypes = [dtype for dtype in ("fp16", "bf16", "fp32") if dtype in words]
        record["dtype"] = dtypes[0] if len(dtypes) == 1 else None
    return record


def _renamed(record: Mapping[str, object]) -> object:
    """autocast's cases, which did not begin with their dtype."""
    case = record["case"]
    if record["op"] != "autocast" or record["limit"] or str(case).startswith(("fp16", "bf16")):
        return case
    return f"fp16 {case.replace(', FP16', '').replace('with backward', 'fwd+bwd')}"


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


def file_for(folder: Path, about: Mapping[str, object]) -> Path:
    """file_in for what environment.describe says."""
    return file_in(folder, about["device"], about["device_name"], about["commit"])


def append(path: str | Path, records: Iterable[Mapping[str, object]]) -> None:
    """Add one line a record; the file and its folder are made where they are not there yet."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
