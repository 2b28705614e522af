"""Train four 1x1 convolutions on a checkerboard by pixel coordinates.

    python bench/workloads/checkerboard.py [--device cuda] [--amp amp_ext] [--size 512]

The input is 1 x 2 x N x N pixel coordinates in [0, 1), the target a checkerboard of 8 x 8 fields;
mean squared error, Adam(1e-3), 500 steps. A prediction of 0.5 everywhere has a loss of 0.25.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from workloads.common import Trainer, follow, positive, summary, workload_parser

FIELDS = 8
WIDTH = 256
SIZES = {"cuda": 512, "cpu": 96}


def network() -> nn.Sequential:
    """Make 1x1 convolutions 2-256-256-256-1 with batch norm and ReLU between them."""
    channels = (2, WIDTH, WIDTH, WIDTH)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(channels):
        layers += [nn.Conv2d(inputs, outputs, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(WIDTH, 1, 1))


def coordinates(size: int) -> Tensor:
    """Return 1 x 2 x size x size float32: x and y of every pixel in [0, 1)."""
    axis = torch.arange(size) / size
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    return torch.stack([x, y]).unsqueeze(0)


def checkerboard(pixels: Tensor) -> Tensor:
    """Return 1 x 1 x N x N float32: 0 or 1, changing at every eighth of both axes."""
    return (pixels * FIELDS).floor().sum(dim=1, keepdim=True).remainder(2)


def training(amp: str, device: torch.device, size: int, **scaler_options) -> Trainer:
    """Train the same initial network every time."""
    torch.manual_seed(0)
    model = network()
    pixels = coordinates(size).to(device)
    batches = itertools.repeat((pixels, checkerboard(pixels)))
    return Trainer(model, nn.functional.mse_loss, batches, amp, device, **scaler_options)


def main(argv: Sequence[str] | None = None) -> None:
    parser = workload_parser(__doc__)
    parser.add_argument("--size", type=positive, help=f"pixels per side; by default {SIZES}")
    parser.add_argument("--steps", type=positive, default=500)
    options = parser.parse_args(argv)
    size = options.size or SIZES[options.device.type]
    trainer = training(options.amp, options.device, size)
    records = follow(trainer, options.steps)
    print(summary(f"checkerboard {size}x{size}", trainer, records))


if __name__ == "__main__":
    main()
