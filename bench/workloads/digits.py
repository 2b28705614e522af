"""Train two linear layers to read handwritten digits.

    python bench/workloads/digits.py [--data DIR] [--device cuda] [--amp amp_ext] [--epochs 2]

MNIST, read by torchvision, where DIR holds it (nothing is downloaded); else scikit-learn's 1797
digits of 8 x 8 pixels, enlarged to MNIST's 28 x 28. 784-256-10 with ReLU; cross-entropy,
Adam(1e-3), batches of 64. The accuracy is on images outside of the training set.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from workloads.common import Batch, Trainer, epochs, follow, positive, summary, workload_parser

SIDE, HIDDEN, CLASSES = 28, 256, 10
BATCH = 64
EVERY = 200
TRAINING_SHARE = 0.8


@dataclass(frozen=True)
class Digits:
    """Hold images N x 28 x 28 float32 in [0, 1] and labels N int64, to train and to test."""

    source: str
    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load(folder: Path) -> Digits:
    """Read MNIST from `folder`/MNIST, or else scikit-learn's digits."""
    if not (folder / "MNIST").is_dir():
        return small_digits()
    from torchvision.datasets import MNIST

    parts = [MNIST(str(folder), train=train) for train in (True, False)]
    tensors = [t for part in parts for t in (part.data.float() / 255, part.targets)]
    return Digits("MNIST", *tensors)


def small_digits() -> Digits:
    from sklearn.datasets import load_digits

    small, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(small).float().view(-1, 1, 8, 8) / 16
    images = nn.functional.interpolate(images, (SIDE, SIDE), mode="bilinear").squeeze(1)
    labels = torch.from_numpy(labels).long()
    count = int(TRAINING_SHARE * len(labels))
    source = f"scikit-learn's digits, 8x8 enlarged to {SIDE}x{SIDE}"
    return Digits(source, images[:count], labels[:count], images[count:], labels[count:])


def training(amp: str, device: torch.device, batches: Iterable[Batch], **scaler_options) -> Trainer:
    """Train the same initial network every time on batches of images and labels."""
    torch.manual_seed(0)
    layers = (nn.Linear(SIDE * SIDE, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    network, loss = nn.Sequential(nn.Flatten(), *layers), nn.functional.cross_entropy
    return Trainer(network, loss, batches, amp, device, **scaler_options)


def main(argv: Sequence[str] | None = None) -> None:
    parser = workload_parser(__doc__)
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder that holds MNIST")
    parser.add_argument("--epochs", type=positive, default=2)
    options = parser.parse_args(argv)
    digits = load(options.data)
    print(f"images: {digits.source}, {len(digits.labels)} to train on", flush=True)

    order = torch.Generator().manual_seed(0)
    pairs = TensorDataset(digits.images, digits.labels)
    loader = DataLoader(pairs, BATCH, shuffle=True, generator=order)
    trainer = training(options.amp, options.device, epochs(loader, options.device))
    records = follow(trainer, options.epochs * len(loader), len(loader), EVERY)
    right = trainer.predict(digits.test_images.to(options.device)).argmax(1) == digits.test_labels
    accuracy = f"accuracy {right.float().mean().item():.1%} of {len(right)}"
    print(summary("digits", trainer, records, accuracy))


if __name__ == "__main__":
    main()
