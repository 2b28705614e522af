"""Whole training steps: FP16 or BF16 under amp_ext and under torch.amp, and FP32."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch

import providers
from registry import BASELINE, BF16, FP16, NAMES, Case, Op, Provider, Setup, Trial, check
from workloads import checkerboard, digits, regression
from workloads.common import Trainer
from workloads.networks import GPT2, ResNet50

FP32_LINE = "fp32"
OURS_AMP, TORCH_AMP, NO_AMP = "amp_ext", "torch", "none"
# No step shall overflow: a skipped one does less work, and its parameters lag behind FP32's.
SCALER = {"init_scale": 1024.0, "growth_interval": 1_000_000}
CHECKED_STEPS = 20
CHECKED_STEPS_OF_NETWORKS = 5  # they learn one batch by heart, and go ways of their own in that
# Of a loss: 16-bit products move each step's gradients by some units of 2**-8 (BF16) at most, and
# training does not amplify that in so few steps.
TOLERANCE = 0.02
Training = Callable[..., Trainer]  # of an amp, a device and the Trainer's options


def checkerboard_trainer(size: int, amp: str, device: torch.device, **options) -> Trainer:
    return checkerboard.training(amp, device, size, **options)


def regression_trainer(amp: str, device: torch.device, **options) -> Trainer:
    return regression.training(amp, device, regression.batches(), **options)


def digits_trainer(amp: str, device: torch.device, **options) -> Trainer:
    """Random images: what is in them does not change the time."""
    generator = torch.Generator().manual_seed(0)
    shape = (digits.BATCH, digits.SIDE, digits.SIDE)
    images = torch.rand(shape, generator=generator).to(device)
    labels = torch.randint(digits.CLASSES, shape[:1], generator=generator).to(device)
    return digits.training(amp, device, itertools.repeat((images, labels)), **options)


def network_trainer(sizes: GPT2 | ResNet50, amp: str, device: torch.device, **options) -> Trainer:
    """The same initial network every time, on one batch of random data."""
    torch.manual_seed(0)
    batches = itertools.repeat(sizes.data(device))
    return Trainer(sizes.network(), sizes.loss, batches, amp, device, **options)


def build(training: Training, steps: int, dtype: torch.dtype, setup: Setup) -> Trial:
    """Each provider trains a network of its own, from the same start on the same batches."""
    new = partial(training, device=setup.device, dtype=dtype, **SCALER)
    mine = providers.ours(setup.device, products=True)
    lines: dict[str, tuple[Trainer, Callable]] = {
        name: (new(OURS_AMP), around) for name, around in mine.items()
    }
    lines[BASELINE] = new(TORCH_AMP), providers.nullcontext
    if setup.compiled and (trainer := compiled(new)):
        lines[providers.COMPILE] = trainer, providers.nullcontext
    scaled = {name: trainer.scaler for name, (trainer, _) in lines.items()}
    lines[FP32_LINE] = new(NO_AMP), providers.nullcontext

    def verify_all() -> None:
        for name, scaler in scaled.items():
            scale = scaler.get_scale()
            check(scale == SCALER["init_scale"], f"{name} skipped steps: its scale is {scale:g}")
        for around in mine.values():
            verify(new(OURS_AMP), new(NO_AMP), steps, around)

    return Trial(
        tuple(
            Provider(name, trainer.run, trainer.advance, around=around)
            for name, (trainer, around) in lines.items()
        ),
        verify_all,
    )


def compiled(new: Callable[[str], Trainer]) -> Trainer | None:
    """torch.amp's trainer with a compiled network; None where that does not compile."""
    trainer = new(TORCH_AMP)

    def step(network: Callable) -> None:
        trainer.network = network
        trainer.advance()
        trainer.run()

    return trainer if providers.compiled(trainer.network, step) else None


def verify(mine: Trainer, expected: Trainer, steps: int, around: Callable) -> None:
    """New networks: amp_ext's losses stay within 2% of FP32's."""
    for step in range(1, steps + 1):
        with around():
            loss = mine.step().loss
        exact = expected.step().loss
        check(
            abs(loss - exact) <= TOLERANCE * exact,
            f"at step {step} the loss is {loss:.4g}, in FP32 {exact:.4g}",
        )


def pixels(setup: Setup) -> int:
    """The checkerboard's side."""
    return 32 if setup.quick else checkerboard.SIZES[setup.device.type]


def limit(setup: Setup) -> Case:
    """The matrix products of a checkerboard step and nothing else."""
    side, device = pixels(setup), setup.device
    dtype = torch.float16 if setup.on_gpu else torch.float32

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

    return Case(f"products of {side} x {side}, {str(dtype)[6:]}", build_products, limit=True)


def gpt2(setup: Setup) -> tuple[str, GPT2]:
    """GPT-2 small, or where that would take minutes a step, a network of its shape."""
    if not setup.small:
        return "GPT-2 small, 8 x 1024 tokens", GPT2()
    if setup.quick:
        sizes = GPT2(layers=2, width=32, heads=2, vocabulary=256, positions=16, batch=2)
        return "GPT-2, 2 of 32 wide, 32 tokens", sizes
    sizes = GPT2(layers=4, width=128, heads=4, vocabulary=2048, positions=64, batch=2)
    return "GPT-2, 4 of 128 wide, 128 tokens", sizes


def resnet50(setup: Setup) -> tuple[str, ResNet50]:
    if not setup.small:
        return "ResNet-50, 64 images of 224", ResNet50()
    if setup.quick:
        sizes = ResNet50(blocks=(1, 1), width=4, side=16, classes=10, batch=4)
        return "ResNet of 2 blocks, 4 x 16 px", sizes
    return "ResNet-50 at 1/8, 8 x 64 px", ResNet50(width=8, side=64, classes=100, batch=8)


def cases(setup: Setup) -> list[Case]:
    side = pixels(setup)
    trainings: dict[str, tuple[Training, int]] = {
        f"checkerboard {side} x {side}": (partial(checkerboard_trainer, side), CHECKED_STEPS),
        f"regression MLP, batch {regression.BATCH}": (regression_trainer, CHECKED_STEPS),
        f"digits MLP, batch {digits.BATCH}": (digits_trainer, CHECKED_STEPS),
    }
    for name, sizes in (gpt2(setup), resnet50(setup)):
        trainings[name] = partial(network_trainer, sizes), CHECKED_STEPS_OF_NETWORKS
    return [
        Case(
            name if dtype == FP16 else f"{name}, {NAMES[dtype]}",
            partial(build, training, steps, dtype, setup),
        )
        for dtype in setup.dtypes(FP16, also=(BF16,))
        for name, (training, steps) in trainings.items()
    ]


OP = Op(
    name="train",
    notes=(
        "A step from zero_grad to scaler.update, until the device is done, with Adam; the next "
        "batch is taken before it, untimed. amp_ext and torch train in FP16, but for cases that "
        "say bf16; compile is torch with its network compiled. The limit is the checkerboard's "
        "eleven matrix products alone.",
    ),
    rate="ms/step",
    host=True,
    limit=limit,
    cases=cases,
)
