"""A compiled training step: no more graph breaks than with torch's scaler, and the same result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import amp_ext
from cases import assert_all_same

INIT_SCALE = 4.0
BATCHES = 3


@pytest.fixture(autouse=True)
def forget_programs() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Training:
    """A small network's steps, the second of which overflows."""

    def __init__(self, package: Any, part: str, fused: bool) -> None:
        torch.manual_seed(0)
        self.network = nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1, fused=fused)
        self.scaler = package.GradScaler("cpu", init_scale=INIT_SCALE)
        self.package, self.part = package, part

    def step(self, x: Tensor) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.network(x).sum()).backward()
        if self.part == "clip" and self.package is amp_ext:
            self.scaler.clip_grad_norm_(self.optimizer, 1.0)
        elif self.part != "plain":
            self.scaler.unscale_(self.optimizer)
        if self.part == "clip" and self.package is not amp_ext:
            nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def run(self, step: Callable[[Tensor], None]) -> list[Tensor]:
        for batch in range(BATCHES):
            x = torch.full((3, 4), torch.inf if batch == 1 else 0.5)
            step(x)
        return [*self.network.parameters(), torch.tensor(self.scaler.get_scale())]


def breaks(package: Any, part: str, fused: bool) -> tuple[int, list[Tensor]]:
    """How many graph breaks, and what has come out."""
    torch.compiler.reset()
    counters.clear()
    training = Training(package, part, fused)
    result = training.run(torch.compile(training.step, backend="eager"))
    return sum(counters["graph_break"].values()), result


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("part", ["plain", "unscale", "clip"])
def test_a_step(part: str, fused: bool) -> None:
    theirs, _ = breaks(torch.amp, part, fused)
    ours, result = breaks(amp_ext, part, fused)
    assert ours <= theirs
    eager = Training(amp_ext, part, fused)
    assert_all_same(result, eager.run(eager.step))
    assert result[-1].item() == INIT_SCALE / 2


def test_scale() -> None:
    def scale(scaler: torch.amp.GradScaler) -> int:
        torch.compiler.reset()
        counters.clear()
        x = torch.ones(2)
        result = torch.compile(lambda: scaler.scale(x + 1) * 2, backend="eager")()
        assert result.tolist() == [4 * INIT_SCALE] * 2
        return sum(counters["graph_break"].values())

    theirs = scale(torch.amp.GradScaler("cpu", init_scale=INIT_SCALE))
    assert scale(amp_ext.GradScaler("cpu", init_scale=INIT_SCALE)) <= theirs
