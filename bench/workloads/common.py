"""Share the options, the training under FP32 or FP16 and the figures of the workloads."""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import amp_ext
from harness.table import three_digits

AMPS = {"none": "FP32", "torch": "torch.amp FP16", "amp_ext": "amp_ext FP16"}
LEARNING_RATE = 1e-3
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class StepRecord:
    """Record one training step."""

    loss: float  # of the batch, before the step
    scale: float  # used by the step; 1 in FP32
    skipped: bool  # the scaler found an overflow and left the parameters alone
    milliseconds: float  # from zero_grad to update, until the device was done


class Trainer:
    """Hold a network with its batches, Adam(1e-3), and the autocast and scaler of an amp.

    Args:
        network: is moved to `device`.
        loss: of prediction and target.
        batches: inputs and targets, on `device`.
        amp: "none" (FP32, a disabled scaler), "torch" or "amp_ext" (both of `dtype`).
        device: where everything lies.
        dtype: of the autocast region.
        scaler_options: of the GradScaler.
    """

    def __init__(
        self,
        network: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        batches: Iterable[Batch],
        amp: str,
        device: torch.device,
        dtype: torch.dtype = torch.float16,
        **scaler_options,
    ) -> None:
        package = {"none": torch.amp, "torch": torch.amp, "amp_ext": amp_ext}[amp]
        enabled = amp != "none"
        self.name = AMPS[amp]
        self.autocast = partial(package.autocast, device.type, dtype, enabled=enabled)
        self.scaler = package.GradScaler(device.type, enabled=enabled, **scaler_options)
        self.network = network.to(device)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=LEARNING_RATE)
        self.loss = loss
        self.batches = iter(batches)
        self.device = device

    def advance(self) -> None:
        """Take the next batch; StopIteration when there is none."""
        self.inputs, self.targets = next(self.batches)

    def run(self) -> Tensor:
        """Take one step on the batch at hand; return the loss before it."""
        self.optimizer.zero_grad()
        with self.autocast():
            loss = self.loss(self.network(self.inputs), self.targets)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return loss.detach()

    def step(self) -> StepRecord:
        """Take one timed step on the next batch."""
        self.advance()
        scale = self.scaler.get_scale()
        start = time.perf_counter()
        loss = self.run()
        milliseconds = (time.perf_counter() - start) * 1e3
        return StepRecord(loss.item(), scale, self.scaler.get_scale() < scale, milliseconds)

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor:
        """Return the network's output, computed as in training, in float32 on the CPU."""
        with self.autocast():
            return self.network(inputs).float().cpu()


def epochs(loader: DataLoader, device: torch.device) -> Iterator[Batch]:
    """Yield the loader's batches on the device, over and over."""
    for _ in itertools.count():
        for inputs, targets in loader:
            yield inputs.to(device), targets.to(device)


def follow(trainer: Trainer, count: int, batches: int = 1, every: int = 0) -> list[StepRecord]:
    """Take `count` steps under a progress bar on stderr.

    After every `every` of the `batches` batches of an epoch, a line on stdout shows the progress;
    never if `every` is 0.
    """
    from tqdm import tqdm

    records = []
    with tqdm(range(count), unit="step", file=sys.stderr) as bar:
        for step in bar:
            epoch, batch = divmod(step, batches)
            records.append(record := trainer.step())
            bar.set_postfix(loss=f"{record.loss:.4f}", scale=f"{record.scale:.10g}", refresh=False)
            if every and (batch + 1) % every == 0:
                tqdm.write(f"epoch {epoch + 1}, batch {batch + 1}: loss {record.loss:.4f}")
    sys.stdout.flush()
    return records


def summary(name: str, trainer: Trainer, records: Sequence[StepRecord], *more: str) -> str:
    """Return the line of figures that a workload ends with."""
    milliseconds = statistics.median(record.milliseconds for record in records)
    figures = (
        f"{len(records)} steps",
        f"{three_digits(milliseconds)} ms a step (median)",
        f"loss {records[-1].loss:.4f}",
        *more,
        f"{sum(record.skipped for record in records)} skipped",
        f"scale {trainer.scaler.get_scale():.10g}",
    )
    return f"{name}, {trainer.name}, {trainer.device}: {', '.join(figures)}"


def positive(text: str) -> int:
    """Read a positive integer of the command line."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {value}")
    return value


def device(text: str) -> torch.device:
    """Read a device that is here: cpu or cuda."""
    if text not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"expected cpu or cuda, got {text}")
    if text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("torch sees no GPU here; use --device cpu")
    return torch.device(text)


def device_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with a module's docstring for its help, and --device."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # figures recognise a quick run by its command
    )
    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--device", type=device, default=best, metavar="cpu|cuda", help="a GPU where there is one"
    )
    return parser


def workload_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with --device and --amp."""
    parser = device_parser(description)
    parser.add_argument("--amp", choices=tuple(AMPS), default="amp_ext")
    return parser
