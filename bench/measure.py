"""Measure one case, and describe where that was."""

from __future__ import annotations

import functools
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

import torch

import amp_ext
import ledger
import timing
from registry import Case, Op, Setup, Trial


@dataclass
class Outcome:
    """A measured case; `error` is why it has no ratio."""

    case: Case
    trial: Trial | None = None
    times: dict[str, timing.Quantiles] = field(default_factory=dict)
    foreign_cores: float | None = None
    error: str | None = None

    def ratio(self, provider: str) -> float | None:
        """The baseline's time over the provider's at p20; above 1 the provider is faster."""
        baseline = self.case.baseline
        if self.error or provider == baseline or baseline not in self.times:
            return None
        return self.times[baseline].p20 / self.times[provider].p20

    def rate(self, provider: str, unit: str) -> float:
        """At p20: 1e9 bytes or operations a second, us a parameter or call, or ms a launch."""
        p20, trial = self.times[provider].p20, self.trial
        match unit:
            case "GB/s":
                return trial.bytes / p20 / 1e3
            case "GFLOP/s":
                return trial.flops / p20 / 1e3
            case "us/param":
                return p20 / trial.parameters
            case "us/call":
                return p20 / trial.calls
        return p20 / 1e3

    def records(self, op: Op, environment: dict[str, object]) -> Iterator[dict]:
        """A line of the ledger for each provider."""
        trial = self.trial
        for provider, time in self.times.items():
            yield {
                "op": op.name,
                "case": self.case.name,
                "provider": provider,
                "baseline": self.case.baseline,
                **{f"{name}_us": us for name, us in asdict(time).items()},
                "bytes": trial.bytes or None,
                "gb_per_s": self.rate(provider, "GB/s") if trial.bytes else None,
                "flops": trial.flops or None,
                "gflop_per_s": self.rate(provider, "GFLOP/s") if trial.flops else None,
                "parameters": trial.parameters or None,
                "calls": trial.calls,
                "ratio": self.ratio(provider),
                "counted": self.case.counted,
                "error": self.error,
                "foreign_cores": self.foreign_cores,
                **environment,
                "utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            }


def measure(case: Case, op: Op, setup: Setup, budget: timing.Budget, ours_only: bool) -> Outcome:
    """Time a case's providers and check their results, whatever goes wrong with it.

    Args:
        case: of `op`.
        op: says which clock.
        setup: as given to the op's cases.
        budget: how long to measure.
        ours_only: leave all providers out but amp_ext's; then there are no ratios.
    """
    outcome = Outcome(case)
    try:
        trial = case.build()
        if ours_only:
            mine = tuple(p for p in trial.providers if p.name in ledger.OURS)
            trial = replace(trial, providers=mine or trial.providers)
        outcome.trial = trial
        if not setup.on_gpu:
            outcome.foreign_cores = timing.foreign_load(wait=0.0 if setup.quick else 0.5)
        events = setup.on_gpu and not op.host
        outcome.times = timing.interleaved(trial.providers, budget, events)
        trial.verify()
    except Exception as error:  # one case's failure must leave the others their results
        outcome.error = f"{type(error).__name__}: {error}"
    return outcome


def describe_environment(device: torch.device, command: str) -> dict[str, object]:
    """What every line of the ledger says of machine and software."""
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
        "commit": commit(),
        "command": command,
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _words_of(*command: str) -> str | None:
    """What a command prints, or None where it fails."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()


def driver() -> str | None:
    """The version of NVIDIA's driver."""
    words = _words_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return words.splitlines()[0] if words else None


@functools.cache
def commit() -> str | None:
    """The commit of the amp_ext that is measured, "-dirty" with local changes.

    Where amp_ext is installed outside of its repository, that of this file; None without git.
    """
    for package in (amp_ext.__file__, __file__):
        if words := _words_of(
            "git", "-C", str(Path(package).parent), "describe", "--always", "--dirty"
        ):
            return words
    return None
