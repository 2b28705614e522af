"""Test torch.compile of a training step: graph breaks and bits of torch's scaler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import amp_ext
import amp_ext.optim
import programs
from twins import OURS, THEIRS, ScalerClass, at_once, plain, torchs_recipe

STEPS = 4
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "fused": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.5, fused=True),
    "amp_ext": lambda params: amp_ext.optim.SGD(params, lr=0.5, momentum=0.5),
}


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def trained(cls: ScalerClass, clips: bool, make: Any, compiles: bool) -> Any:
    """Parameters and scale after some steps, one of them with an overflow."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    params = list(model.parameters())
    optimizer = make(params)
    scaler = cls("cpu", init_scale=4.0, growth_interval=2)

    def step(inputs: Tensor) -> Tensor:
        loss = scaler.scale(model(inputs).square().sum())
        loss.backward()
        if clips:
            (at_once if cls is OURS else torchs_recipe)(scaler, optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    run = torch.compile(step, backend="eager") if compiles else step
    losses = []
    for number in range(STEPS):
        optimizer.zero_grad()
        inputs = torch.full((2, 4), float("inf") if number == 2 else 0.25)
        losses.append(run(inputs).detach())
    return plain([losses, params, scaler.state_dict()])


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_graph_breaks(name: str, clips: bool) -> None:
    breaks = []
    for cls in (THEIRS, OURS):
        torch._dynamo.reset()
        counters.clear()
        result = trained(cls, clips, OPTIMIZERS[name], compiles=True)
        breaks.append(sum(counters["graph_break"].values()))
        if cls is OURS:
            torch._dynamo.reset()
            assert result == trained(cls, clips, OPTIMIZERS[name], compiles=False)
    theirs, ours = breaks
    assert 0 < ours <= theirs, dict(counters["graph_break"])


def test_the_compiler_is_not_imported() -> None:
    """A compiler imported later skips the scaler and the optimizers."""
    programs.output("""
        import sys, amp_ext
        assert "torch._dynamo" not in sys.modules
        from torch._dynamo.trace_rules import check
        assert check(amp_ext.GradScaler.step) and check(amp_ext.optim.SGD.step)
    """)


def test_subclasses_are_traced() -> None:
    """torch.compile traces subclasses: only methods of the scaler's own files run untraced."""

    class Own(amp_ext.GradScaler):
        def scale(self, outputs: Any) -> Any:
            return outputs * 2.0

    scaler = Own("cpu")
    compiled = torch.compile(lambda x: scaler.scale(x), backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
