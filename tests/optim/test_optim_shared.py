"""Test that torch's step updates parameters with shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_ext import GradScaler, optim
from twins import plain


def tied() -> list[Tensor]:
    """Return an embedding and a head that is tied to it by `.data`, apart in the list."""
    embedding, between, head = (nn.Parameter(torch.randn(4, 3)) for _ in range(3))
    head.data = embedding.data
    return [embedding, between, head]


def parts() -> list[Tensor]:
    """Return two parameters that share one row of a buffer."""
    buffer = torch.randn(6, 3)
    return [nn.Parameter(buffer[:3]), nn.Parameter(buffer[2:])]


def twice() -> list[Tensor]:
    """Return one parameter twice, which torch updates twice, with a warning."""
    return 2 * [nn.Parameter(torch.randn(4, 3))]


SHARED: list[Callable[[], list[Tensor]]] = [tied, parts, twice]
NAMES = ("Adam", "AdamW", "SGD")
OPTIONS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.5, "dampening": 0.25}}


def make(module: Any, name: str, params: list[Tensor], **options: Any) -> torch.optim.Optimizer:
    return getattr(module, name)(params, lr=0.1, **OPTIONS.get(name, {}), **options)


def trained(
    module: Any, name: str, share: Callable[[], list[Tensor]], scaler: Any = None
) -> list[Tensor]:
    torch.manual_seed(0)
    params = share()
    optimizer = make(module, name, params)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        if scaler is None:
            optimizer.step()
            continue
        scaler.scale(torch.ones(()))
        for param in params:
            param.grad *= scaler.get_scale()
        scaler.clip_grad_norm_(optimizer, 0.5)
        scaler.step(optimizer)
        scaler.update()
    return [param.detach().clone() for param in params]


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("share", SHARED, ids=lambda share: share.__name__)
def test_trains_as_torch(share: Callable[[], list[Tensor]], name: str) -> None:
    assert plain(trained(optim, name, share)) == plain(trained(torch.optim, name, share))


@pytest.mark.parametrize("name", NAMES)
def test_a_scaler_unscales_before_the_step(name: str) -> None:
    """Tied weights train with a scaler as torch's optimizer does with it."""
    expected = trained(torch.optim, name, tied, GradScaler("cpu", 4.0))
    assert plain(trained(optim, name, tied, GradScaler("cpu", 4.0))) == plain(expected)


def test_weights_tied_between_steps() -> None:
    """A tie after some steps is found, and kernels serve the weights again without it."""
    params = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))]
    optimizer, memory = optim.SGD(params, lr=0.5), params[1].data
    for tie, expected in ((memory, 0.5), (params[0].data, -0.5), (memory, -0.0)):
        params[1].data = tie
        for param in params:
            param.grad = torch.ones(4)
        optimizer.step()
        assert params[1].tolist() == [expected] * 4


def test_groups_share_memory() -> None:
    """Groups are updated one after the other."""
    first = nn.Parameter(torch.ones(4))
    second = nn.Parameter(first.data)
    optimizer = optim.SGD([{"params": [first]}, {"params": [second]}], lr=0.25)
    first.grad = second.grad = torch.ones(4)
    optimizer.step()
    assert first.tolist() == second.tolist() == [0.5] * 4


def test_storage_that_torch_does_not_know() -> None:
    params = tied()
    optimizer = make(optim, "AdamW", params, autocast_copies=torch.float16)
    before = plain([param.detach() for param in params])
    for param in params:
        param.grad = torch.ones_like(param)
    text = r"param_groups\[0\]\['params'\]\[0\] shares memory with .*\[2\]"
    with pytest.raises(RuntimeError, match=text):
        optimizer.step()
    assert plain([param.detach() for param in params]) == before
