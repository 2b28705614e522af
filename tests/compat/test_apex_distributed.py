"""Test Apex's amp with DistributedDataParallel around the result of amp.initialize."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from amp_ext.compat.apex import amp
from ranks import DEVICE, Cases, needs_gloo, run

pytestmark = needs_gloo
CASES = Cases(lambda world, folder: (world,))
STEPS, OVERFLOW = 4, 2


def train(model: nn.Module, data: list[Tensor], opt_level: str, bucket_view: bool | None) -> None:
    """Train with two losses a step; their gradients add up."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    if bucket_view is not None:
        model = DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
    for step in range(STEPS):
        optimizer.zero_grad()
        for i, x in enumerate(data):
            loss = model(x).square().mean()
            if (step, i) == (OVERFLOW, 0) and (bucket_view is None or distributed.get_rank() == 1):
                loss = loss * float("inf")
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).to(DEVICE)


def computes_what_one_process_computes(world: int, opt_level: str, bucket_view: bool) -> None:
    """Two ranks of the same data train bit for bit as one process, an overflow included."""
    torch.manual_seed(1)
    data = [torch.randn(4, 8, device=DEVICE) for _ in range(2)]
    alone, model = network(), network()
    train(alone, data, opt_level, None)
    expected = amp.state_dict()
    assert expected["loss_scaler0"] == {"loss_scale": 2.0**15, "unskipped": 3}
    train(model, data, opt_level, bucket_view)
    assert amp.state_dict() == expected
    for param, its in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(param, its)


for options in itertools.product(("O1", "O2"), (False, True)):
    CASES.add(computes_what_one_process_computes, *options)


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run("test_apex_distributed", 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES)
def test_on_two_ranks(errors: list[dict[str, str]], case: str) -> None:
    """No rank reports an error."""
    assert [error.get(case, "") for error in errors] == ["", ""]
