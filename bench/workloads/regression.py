"""Fit a small network to noisy data: a Dataset, a shuffled DataLoader, two layers.

    python bench/workloads/regression.py [--device cuda] [--amp amp_ext] [--epochs 10]

10,000 samples, X ~ N(0, 1) of 10 features, y = 5 N(0, 1) + 10; Linear 10-20, ReLU, Linear 20-1;
mean squared error, Adam(1e-3), batches of 64. y does not depend on X: the best loss is the noise's
variance, 25.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from workloads.common import Trainer, epochs, follow, positive, summary, workload_parser

SAMPLES, FEATURES, HIDDEN = 10_000, 10, 20
BATCH = 64
EVERY = 100


class Noise(Dataset):
    """Hold `SAMPLES` pairs of features [10] and a target [1], the same every time."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.features = torch.randn(SAMPLES, FEATURES, generator=generator)
        self.targets = 5 * torch.randn(SAMPLES, 1, generator=generator) + 10

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.features[index], self.targets[index]


def batches() -> DataLoader:
    """Return batches, shuffled in the same order every time."""
    return DataLoader(Noise(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(0))


def training(amp: str, device: torch.device, loader: DataLoader, **scaler_options) -> Trainer:
    """Train the same initial network every time."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
    loss, repeated = nn.functional.mse_loss, epochs(loader, device)
    return Trainer(network, loss, repeated, amp, device, **scaler_options)


def main(argv: Sequence[str] | None = None) -> None:
    parser = workload_parser(__doc__)
    parser.add_argument("--epochs", type=positive, default=10)
    options = parser.parse_args(argv)
    loader = batches()
    trainer = training(options.amp, options.device, loader)
    records = follow(trainer, options.epochs * len(loader), len(loader), EVERY)
    print(summary("regression", trainer, records))


if __name__ == "__main__":
    main()
