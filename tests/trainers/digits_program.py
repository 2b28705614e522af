"""Train digits for six steps by training frameworks; the third step overflows.

The network computes its own loss and records it, for checks under each framework.
"""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amp_ext
import amp_ext.optim
from twins import CUDA

SIDE, HIDDEN, CLASSES, BATCH = 28, 256, 10, 16
STEPS, OVERFLOW, MAX_NORM = 6, 2, 0.25

# Without a GPU, the frameworks refuse or ignore float16; tests/fake_cuda has a GPU.
on_cuda = [pytest.mark.usefixtures("device"), pytest.mark.parametrize("device", CUDA)]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "plain": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    "amp_ext.optim": lambda parameters: amp_ext.optim.AdamW(parameters, lr=1e-3),
}
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)


class Network(nn.Module):
    """784-256-10 with ReLU and its cross-entropy; `losses` has that of each call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(SIDE * SIDE, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
        )
        self.losses: list[float] = []

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(self.layers(images), labels)
        self.losses.append(loss.item())
        return loss

    def values(self) -> Tensor:
        return torch.cat([parameter.detach().flatten().cpu() for parameter in self.parameters()])


def batches() -> list[tuple[Tensor, Tensor]]:
    """STEPS times BATCH images of SIDE * SIDE float32 and their int64 labels: a pattern for each
    class, and noise. One pixel of the batch OVERFLOW is infinite."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(CLASSES, SIDE * SIDE, generator=generator)
    made = []
    for _ in range(STEPS):
        labels = torch.randint(CLASSES, (BATCH,), generator=generator)
        noise = torch.rand(BATCH, SIDE * SIDE, generator=generator)
        made.append((patterns[labels] + noise / 4, labels))
    made[OVERFLOW][0][0, 0] = torch.inf
    return made


def samples() -> list[tuple[Tensor, Tensor]]:
    """Return the images one by one; a loader of BATCH makes these batches again."""
    return [sample for batch in batches() for sample in zip(*batch, strict=True)]


@functools.cache
def written_out(optimizer: str, clip_as: str = "scaler", images_as: str = "float32") -> Network:
    """Return the network of a loop that skips one step and learns in the others.

    Norms are clipped by the scaler or by "torch"; with "value", each element is clipped.
    """
    network = Network().cuda()
    stepping = OPTIMIZERS[optimizer](network.parameters())
    scaler = amp_ext.GradScaler("cuda")
    for step, (images, labels) in enumerate(batches()):
        before = network.values()
        stepping.zero_grad()
        with amp_ext.autocast("cuda", torch.float16):
            loss = network(images.cuda().to(getattr(torch, images_as)), labels.cuda())
        scaler.scale(loss).backward()
        if clip_as == "scaler":
            scaler.clip_grad_norm_(stepping, MAX_NORM)
        else:
            scaler.unscale_(stepping)
            clip = nn.utils.clip_grad_norm_ if clip_as == "torch" else nn.utils.clip_grad_value_
            clip(network.parameters(), MAX_NORM)
        scaler.step(stepping)
        scaler.update()
        assert network.values().equal(before) == (step == OVERFLOW)
    assert network.losses[-1] < network.losses[0]
    return network


def assert_takes_and_gives_no_scale(guard: amp_ext.GradScaler) -> None:
    """Assert that a scaler for bfloat16 and one for float16 exchange states, but no scale."""
    scaler = amp_ext.GradScaler("cuda", 4.0)
    guard.load_state_dict(scaler.state_dict() | {"amp_ext": {"skipped_steps": 3}})
    scaler.load_state_dict(guard.state_dict())
    assert (guard.get_scale(), guard.get_skipped_steps()) == (1.0, 3)
    assert (scaler.get_scale(), scaler.get_skipped_steps()) == (2.0**16, 3)


def assert_is_the_loop(network: Network, optimizer: str, **loop: str) -> None:
    """Assert that the last steps of a network are those of the loop, bit for bit."""
    expected = written_out(optimizer, **loop)
    losses = [torch.tensor(each.losses[-len(network.losses) :]) for each in (network, expected)]
    torch.testing.assert_close(*losses, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(network.values(), expected.values())
