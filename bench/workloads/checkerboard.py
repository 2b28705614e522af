"""A network of four 1x1 convolutions learns a checkerboard from pixel coordinates.

    python bench/workloads/checkerboard.py --amp amp_ext --device cuda --size 512 --steps 500

The input is 1 x 2 x N x N pixel coordinates in [0, 1), the target a checkerboard of 8 x 8 fields;
mean squared error, Adam(1e-3). A prediction of 0.5 everywhere has a loss of 0.25.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from tqdm import tqdm

import amp_ext

FIELDS = 8
WIDTH = 256
LEARNING_RATE = 1e-3


def network() -> nn.Sequential:
    """1x1 convolutions 2-256-256-256-1 with batch norm and ReLU between them."""
    channels = (2, WIDTH, WIDTH, WIDTH)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(channels):
        layers += [nn.Conv2d(inputs, outputs, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(WIDTH, 1, 1))


def coordinates(size: int) -> Tensor:
    """1 x 2 x size x size float32: x and y of every pixel in [0, 1)."""
    axis = torch.arange(size) / size
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    return torch.stack([x, y]).unsqueeze(0)


def checkerboard(pixels: Tensor) -> Tensor:
    """1 x 1 x N x N float32: 0 or 1, changing at every eighth of both axes."""
    return (pixels * FIELDS).floor().sum(dim=1, keepdim=True).remainder(2)


@dataclass(frozen=True)
class StepRecord:
    """One training step.

    Args:
        loss: mean squared error before the step.
        scale: loss scale that the step used.
        skipped: the scaler found an overflow and left the parameters alone.
        milliseconds: the whole step from zero_grad to update, until the device was done.
    """

    loss: float
    scale: float
    skipped: bool
    milliseconds: float


@dataclass
class Training:
    """The network with its data, optimizer and scaler.

    Args:
        autocast: makes the context manager of a forward pass.
        scaler: torch.amp.GradScaler or a subclass, possibly disabled.
        size: pixels per side.
        device: where everything lies.
        seed: of the initial parameters.
    """

    autocast: Callable[[], contextlib.AbstractContextManager]
    scaler: torch.amp.GradScaler
    size: int
    device: torch.device
    seed: int = 0
    network: nn.Sequential = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.network = network().to(self.device)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=LEARNING_RATE)
        self.pixels = coordinates(self.size).to(self.device)
        self.target = checkerboard(self.pixels)

    def step(self) -> StepRecord:
        scale = self.scaler.get_scale()
        start = time.perf_counter()
        self.optimizer.zero_grad()
        with self.autocast():
            loss = nn.functional.mse_loss(self.network(self.pixels), self.target)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        milliseconds = (time.perf_counter() - start) * 1e3
        skipped = self.scaler.get_scale() < scale
        return StepRecord(loss.item(), scale, skipped, milliseconds)

    def steps(self, count: int) -> Iterator[StepRecord]:
        return (self.step() for _ in range(count))

    @torch.no_grad()
    def output(self) -> Tensor:
        """size x size float32 on the CPU: the prediction, computed as in training."""
        with self.autocast():
            return self.network(self.pixels)[0, 0].float().cpu()

    @torch.no_grad()
    def drawing(self, size: int) -> Tensor:
        """size x size float32 on the CPU: the learned function in FP32 on any grid."""
        return self.network(coordinates(size).to(self.device))[0, 0].cpu()


def training(amp: str, device: torch.device, size: int, **scaler_options) -> Training:
    """The training under amp "none" (FP32), "torch" or "amp_ext" (both FP16)."""
    package = {"none": torch.amp, "torch": torch.amp, "amp_ext": amp_ext}[amp]
    enabled = amp != "none"
    autocast = partial(package.autocast, device.type, torch.float16, enabled=enabled)
    scaler = package.GradScaler(device.type, enabled=enabled, **scaler_options)
    return Training(autocast, scaler, size, device)


def summary(records: Sequence[StepRecord]) -> str:
    times = statistics.median(record.milliseconds for record in records)
    skipped = sum(record.skipped for record in records)
    return (
        f"{len(records)} steps, {times:.1f} ms a step (median), loss {records[-1].loss:.4f}, "
        f"{skipped} skipped, scale {records[-1].scale:g}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--amp", choices=("none", "torch", "amp_ext"), default="amp_ext")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", type=int, default=512, help="pixels per side")
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args(argv)
    run = training(options.amp, torch.device(options.device), options.size)
    records = []
    with tqdm(run.steps(options.steps), total=options.steps, unit="step", file=sys.stderr) as bar:
        for record in bar:
            records.append(record)
            bar.set_postfix(loss=f"{record.loss:.4f}", scale=f"{record.scale:g}")
    print(f"{options.size}x{options.size}, {options.amp}, {options.device}: {summary(records)}")


if __name__ == "__main__":
    main()
