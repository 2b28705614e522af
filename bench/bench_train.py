"""Whole training steps: FP16 under amp_ext and under torch.amp, and FP32."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch

from registry import BASELINE, OURS, Case, Op, Provider, Trial, check
from workloads import checkerboard, digits, regression
from workloads.common import Trainer

FP32 = "fp32"
WAYS = {OURS: "amp_ext", BASELINE: "torch", FP32: "none"}
# No step shall overflow: a skipped one does less work, and its parameters lag behind FP32's.
SCALER = {"init_scale": 1024.0, "growth_interval": 1_000_000}
CHECKED_STEPS = 20
TOLERANCE = 0.02


def checkerboard_trainer(size: int, amp: str, device: torch.device) -> Trainer:
    return checkerboard.training(amp, device, size, **SCALER)


def regression_trainer(amp: str, device: torch.device) -> Trainer:
    return regression.training(amp, device, regression.batches(), **SCALER)


def digits_trainer(amp: str, device: torch.device) -> Trainer:
    """Random images: what is in them does not change the time."""
    generator = torch.Generator().manual_seed(0)
    shape = (digits.BATCH, digits.SIDE, digits.SIDE)
    images = torch.rand(shape, generator=generator).to(device)
    labels = torch.randint(digits.CLASSES, shape[:1], generator=generator).to(device)
    return digits.training(amp, device, itertools.repeat((images, labels)), **SCALER)


def build(trainer: Callable[[str, torch.device], Trainer], device: torch.device) -> Trial:
    """Each provider trains a network of its own, from the same start on the same batches."""
    trainers = {name: trainer(amp, device) for name, amp in WAYS.items()}
    providers = tuple(Provider(name, t.run, t.advance) for name, t in trainers.items())

    def verify_all() -> None:
        for name in (OURS, BASELINE):
            scale = trainers[name].scaler.get_scale()
            check(scale == SCALER["init_scale"], f"{name} skipped steps: its scale is {scale:g}")
        verify(trainer, device)

    return Trial(providers, verify_all)


def verify(trainer: Callable[[str, torch.device], Trainer], device: torch.device) -> None:
    """New networks: amp_ext's losses stay within 2% of FP32's."""
    mine, expected = (trainer(WAYS[name], device) for name in (OURS, FP32))
    for step in range(1, CHECKED_STEPS + 1):
        losses = mine.step().loss, expected.step().loss
        difference = abs(losses[0] - losses[1]) / losses[1]
        check(
            difference <= TOLERANCE,
            f"at step {step} the loss is {losses[0]:.4g}, in FP32 {losses[1]:.4g}",
        )


def pixels(device: torch.device, quick: bool) -> int:
    """The checkerboard's side."""
    return 32 if quick else checkerboard.SIZES[device.type]


def limit(device: torch.device, quick: bool) -> Case:
    """The matrix products of a checkerboard step and nothing else."""
    side = pixels(device, quick)
    dtype = torch.float16 if device.type == "cuda" else torch.float32

    def build_products() -> Trial:
        channels = (2, *3 * [checkerboard.WIDTH], 1)
        products = []
        for inputs, outputs in pairwise(channels):
            x, y, w = (
                torch.randn(shape, device=device).to(dtype)
                for shape in ((inputs, side**2), (outputs, side**2), (outputs, inputs))
            )
            products += [(w, x, torch.empty_like(y)), (y, x.T, torch.empty_like(w))]
            if inputs > channels[0]:
                products.append((w.T, y, torch.empty_like(x)))

        def launch() -> None:
            for a, b, out in products:
                torch.mm(a, b, out=out)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        return Trial((Provider("torch.mm", launch),))

    return Case(f"limit: products of {side} x {side}, {str(dtype)[6:]}", build_products)


def cases(device: torch.device, quick: bool) -> list[Case]:
    side = pixels(device, quick)
    trainers = {
        f"checkerboard {side} x {side}": partial(checkerboard_trainer, side),
        f"regression MLP, batch {regression.BATCH}": regression_trainer,
        f"digits MLP, batch {digits.BATCH}": digits_trainer,
    }
    return [Case(name, partial(build, trainer, device)) for name, trainer in trainers.items()]


OP = Op(
    name="train",
    notes=(
        "A step from zero_grad to scaler.update, until the device is done, with Adam; the next "
        "batch is taken before it, untimed. amp_ext and torch train in FP16. The limit is the "
        "checkerboard's eleven matrix products alone.",
    ),
    rate="ms/step",
    host=True,
    limit=limit,
    cases=cases,
)
