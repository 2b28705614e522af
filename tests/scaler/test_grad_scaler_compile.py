"""Test torch.compile of a training step: graph breaks and bits of torch's scaler."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import amp_ext
import amp_ext.optim
import programs
from twins import OURS, THEIRS, ScalerClass, at_once, plain, torchs_recipe

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "fused": partial(torch.optim.SGD, lr=0.5, momentum=0.5, fused=True),
    "amp_ext": partial(amp_ext.optim.SGD, lr=0.5, momentum=0.5),
}


def trained(cls: ScalerClass, clips: bool, name: str, compiles: bool) -> tuple[Any, int]:
    """Return losses, parameters and scale after steps with an overflow; and graph breaks."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = OPTIMIZERS[name](model.parameters())
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
    for value in (0.25, 0.25, float("inf"), 0.25):
        optimizer.zero_grad()
        losses.append(run(torch.full((2, 4), value)).detach())
    result = plain([losses, list(model.parameters()), scaler.state_dict()])
    return result, sum(counters["graph_break"].values())


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_graph_breaks(name: str, clips: bool) -> None:
    _, theirs = trained(THEIRS, clips, name, compiles=True)
    result, ours = trained(OURS, clips, name, compiles=True)
    assert 0 < ours <= theirs
    assert result == trained(OURS, clips, name, compiles=False)[0]


def test_the_compiler_is_imported_later() -> None:
    """A compiler imported later skips the scaler and the optimizers."""
    programs.output("""
        import amp_ext
        from torch._dynamo.trace_rules import check
        assert check(amp_ext.GradScaler.step) and check(amp_ext.optim.SGD.step)
    """)


def test_subclasses_are_traced() -> None:
    """torch.compile traces subclasses: only methods of the scaler's own files run untraced."""

    class Own(amp_ext.GradScaler):
        def scale(self, outputs: Any) -> Any:
            return outputs * 2.0

    torch._dynamo.reset()
    scaler = Own("cpu")
    compiled = torch.compile(lambda x: scaler.scale(x), backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
