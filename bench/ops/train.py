"""Time whole training steps: FP16 or BF16 under amp_ext and torch.amp, and FP32."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import islice

import torch
from torch import Tensor

from harness import providers
from harness.ledger import FP32_LINE
from harness.registry import BF16, FP16, NAMES, Case, Op, Provider, Setup, Trial, Work, bound, check
from workloads import checkerboard, digits, regression
from workloads.common import Batch, Trainer
from workloads.networks import GPT2, ResNet50

OURS_AMP, TORCH_AMP, NO_AMP = "amp_ext", "torch", "none"
# No step may overflow: a skipped step does less work, and its parameters lag behind FP32's.
SCALER = {"init_scale": 1024.0, "growth_interval": 1_000_000}
BATCHES = 20  # of a training, one after the other and again from the first

# The check takes a few steps by SGD. Each moves the parameters by this part of their norm. All then
# go nearly the same way, and rounding of FP32 parameters is not a thousandth of it.
CHECKED_STEPS, STRIDE = 4, 1e-4
# Tolerance of the first loss: rounding to 16 bits moves losses by less than a thousandth.
LOSS_TOLERANCE = 0.02
# Tolerance of the way in FP32. Rounding to BF16 changes one step's gradients by up to 0.17, through
# the norms and ReLUs of a narrow ResNet-50. Steps differ in their changes, so the way is less than
# 0.13 off. A training that loses every second step is 0.5 off.
WAY_TOLERANCE = 0.3
Start = Callable[[], Trainer]
FirstSteps = tuple[list[float], list[Tensor]]  # losses, and how far each parameter has moved


def random_digits(device: torch.device) -> Batch:
    """Make images and labels: their content does not change the time."""
    generator = torch.Generator().manual_seed(0)
    shape = (digits.BATCH, digits.SIDE, digits.SIDE)
    images = torch.rand(shape, generator=generator).to(device)
    return images, torch.randint(digits.CLASSES, shape[:1], generator=generator).to(device)


def network_trainer(sizes: GPT2 | ResNet50, device: torch.device) -> Trainer:
    """Train the same initial network every time, on one batch of random data."""
    torch.manual_seed(0)
    batches = itertools.repeat(sizes.data(device))
    return Trainer(sizes.network(), sizes.loss, batches, NO_AMP, device)


class Training:
    """Hold the network, the loss and the batches at the start of every line.

    Args:
        start: makes a trainer of the network on its batches.
        dtype: of autocast regions.
        device: where everything lies.
    """

    def __init__(self, start: Start, dtype: torch.dtype, device: torch.device) -> None:
        pattern = start()
        self.network, self.loss = pattern.network, pattern.loss
        self.batches = list(islice(pattern.batches, BATCHES))
        self.dtype, self.device = dtype, device

    def trainer(self, amp: str) -> Trainer:
        """Make a trainer of a copy of the network."""
        network, batches = copy.deepcopy(self.network), itertools.cycle(self.batches)
        return Trainer(network, self.loss, batches, amp, self.device, self.dtype, **SCALER)

    def restart(self, trainer: Trainer, lr: float) -> FirstSteps:
        """Set a trainer back to the start, and take the first steps by SGD."""
        begin = [parameter.detach() for parameter in self.network.parameters()]
        parameters = trainer.optimizer.param_groups[0]["params"]
        with torch.no_grad():
            torch._foreach_copy_(parameters, begin)
        trainer.optimizer = torch.optim.SGD(parameters, lr)
        trainer.batches = iter(self.batches)
        losses = [trainer.step().loss for _ in range(CHECKED_STEPS)]
        return losses, torch._foreach_sub([p.detach() for p in parameters], begin)

    def stride(self) -> float:
        """Return the learning rate for a first step in FP32 of the wanted length."""
        trainer = self.trainer(NO_AMP)
        trainer.advance()
        trainer.run()
        gradients = [p.grad for p in trainer.network.parameters() if p.grad is not None]
        return STRIDE * norm(list(self.network.parameters())) / norm(gradients)


@torch.no_grad()
def norm(tensors: Sequence[Tensor]) -> float:
    """Return the L2 norm of all tensors."""
    return torch.stack(torch._foreach_norm(tensors)).norm().item()


def build(start: Start, dtype: torch.dtype, setup: Setup) -> Trial:
    """Make a trial of a network for each provider, from the same start on the same batches."""
    training = Training(start, dtype, setup.device)
    new = {amp: partial(training.trainer, amp) for amp in (OURS_AMP, TORCH_AMP, NO_AMP)}
    lines = providers.lines(new[OURS_AMP], new[TORCH_AMP], setup.device, products=True)
    lines.append(Provider(FP32_LINE, new[NO_AMP], around=providers.without_tf32))
    trainers: dict[str, Trainer] = {}

    def timed(provider: Provider) -> Provider:
        trainers[provider.name] = trainer = provider.launch()
        return replace(provider, launch=trainer.run, prepare=trainer.advance)

    @cache
    def expected() -> tuple[float, FirstSteps]:
        """Return the learning rate, and its first steps in FP32."""
        with providers.without_tf32():
            lr = training.stride()
            return lr, training.restart(new[NO_AMP](), lr)

    def verify_line(provider: Provider) -> None:
        trainer = trainers[provider.name]
        scale = trainer.scaler.get_scale()
        check(scale == SCALER["init_scale"], f"steps were skipped: the scale is {scale:g}")
        lr, steps = expected()
        verify(training.restart(trainer, lr), steps)

    return Trial(lines, verify_line, Work(), timed, unchecked=[FP32_LINE])


def verify(steps: FirstSteps, expected: FirstSteps) -> None:
    """Expect losses and parameters near FP32's."""
    (losses, way), (exact_losses, exact_way) = steps, expected
    for number, (loss, exact) in enumerate(zip(losses, exact_losses, strict=True), 1):
        near = abs(loss - exact) <= LOSS_TOLERANCE * exact_losses[0]
        check(near, f"at step {number} the loss is {loss:.4g}, in FP32 {exact:.4g}")
    off = norm(torch._foreach_sub(way, exact_way)) / norm(exact_way)
    words = f"after {len(losses)} steps parameters are off by {off:.2g} of their way in FP32"
    check(off <= WAY_TOLERANCE, words)


def pixels(setup: Setup) -> int:
    """Return the checkerboard's side."""
    return 32 if setup.quick else checkerboard.SIZES[setup.device.type]


def limit(setup: Setup) -> Case:
    """Time the large matrix products of a checkerboard step and nothing else."""
    side, width, device = pixels(setup), checkerboard.WIDTH, setup.device
    dtype = torch.float16 if setup.on_gpu else torch.float32

    def make() -> Callable[[], None]:
        x = torch.randn(width, side**2, device=device).to(dtype)
        w, out = torch.randn(width, width, device=device).to(dtype), torch.empty_like(x)
        gradient = torch.empty_like(w)

        def launch() -> None:
            for _ in range(2):  # layers: forward, and both gradients
                torch.mm(w, x, out=out)
                torch.mm(w.T, x, out=out)
                torch.mm(x, x.T, out=gradient)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        return launch

    words = f"products of {side} x {side}, {str(dtype)[6:]}"
    return bound(words, make, provider="torch.mm")


def networks(setup: Setup) -> dict[str, GPT2 | ResNet50]:
    """Return GPT-2 small and ResNet-50, or networks of their shapes that take no minutes."""
    if not setup.small:
        return {"GPT-2 small, 8 x 1024 tokens": GPT2(), "ResNet-50, 64 images of 224": ResNet50()}
    if setup.quick:
        return {
            "GPT-2, 2 of 32 wide, 32 tokens": GPT2(2, 32, 2, 256, 16, 2),
            "ResNet of 2 blocks, 4 x 16 px": ResNet50((1, 1), 4, 16, 10, 4),
        }
    return {
        "GPT-2, 4 of 128 wide, 128 tokens": GPT2(4, 128, 4, 2048, 64, 2),
        "ResNet-50 at 1/8, 8 x 64 px": ResNet50(width=8, side=64, classes=100, batch=8),
    }


def cases(setup: Setup) -> list[Case]:
    side, device = pixels(setup), setup.device
    starts: dict[str, Start] = {
        f"checkerboard {side} x {side}": lambda: checkerboard.training(NO_AMP, device, side),
        f"regression MLP, batch {regression.BATCH}": lambda: regression.training(
            NO_AMP, device, regression.batches()
        ),
        f"digits MLP, batch {digits.BATCH}": lambda: digits.training(
            NO_AMP, device, itertools.repeat(random_digits(device))
        ),
    }
    for name, sizes in networks(setup).items():
        starts[name] = partial(network_trainer, sizes, device)
    return [
        Case(
            name if dtype == FP16 else f"{name}, {NAMES[dtype]}",
            partial(build, start, dtype, setup),
            dtype=dtype,
        )
        for dtype in setup.dtypes(FP16, also=(BF16,))
        for name, start in starts.items()
    ]


OP = Op(
    name="train",
    notes="A step from zero_grad to scaler.update, until the device is done, with Adam; the next "
    "batch is taken before it, untimed. amp_ext and torch train in FP16, cases that say bf16 in "
    "BF16; fp32 is without TF32. The limit is the "
    "checkerboard's six large matrix products alone.",
    rate="ms/step",
    host=True,
    limit=limit,
    cases=cases,
)
