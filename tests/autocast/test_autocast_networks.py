"""Test whole networks: checkpoints and TorchScript."""

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import amp_ext
from autocast_cases import Seen
from cases import assert_all_same, assert_same

T = TypeVar("T")
Run = Callable[[nn.Module, Tensor], Tensor]
FP16 = torch.float16


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def checkpointed(net: nn.Module, x: Tensor, reentrant: bool = False) -> Tensor:
    return checkpoint(net, x, use_reentrant=reentrant)


CHECKPOINTS: dict[str, Run] = {
    "checkpoint": checkpointed,
    "reentrant": partial(checkpointed, reentrant=True),
    "nested": lambda net, x: checkpointed(partial(checkpointed, net), x),
    "nested, reentrant": lambda net, x: checkpointed(
        partial(checkpointed, net, reentrant=True), x, True
    ),
}
every_checkpoint = pytest.mark.parametrize("run", CHECKPOINTS.values(), ids=CHECKPOINTS)


@pytest.fixture(params=["amp_ext.autocast", "install"])
def region(request: pytest.FixtureRequest) -> Iterator[Any]:
    """amp_ext's regions, and torch's after amp_ext.install()."""
    if request.param == "amp_ext.autocast":
        yield amp_ext.autocast
        return
    amp_ext.install()
    yield torch.autocast
    amp_ext.uninstall()


def step(run: Run, net: nn.Module, x: Tensor, context: Any) -> list[Tensor]:
    """Return the result, and the gradients of the parameters and of the input."""
    leaves = [*net.parameters(), x]
    for leaf in leaves:
        leaf.grad = None
    with context:
        result = run(net, x)
    result.float().square().mean().backward()
    return [result.detach(), *(leaf.grad for leaf in leaves)]


@every_checkpoint
def test_checkpoint(run: Run, region: Any) -> None:
    """The second forward pass outside the region has the routing and bits of the first."""
    net, x = perceptron(), torch.randn(3, 4, requires_grad=True)
    expected = step(nn.Module.__call__, net, x, region("cpu", FP16))
    with Seen() as seen:
        actual = step(run, net, x, region("cpu", FP16))
    # The last product is needed again by a reentrant checkpoint only.
    again = {CHECKPOINTS["reentrant"]: 2, CHECKPOINTS["nested, reentrant"]: 4}.get(run, 1)
    assert (seen.gemms, seen.torchs) == (2 + again + 4, 0)
    assert_all_same(actual, expected)


@pytest.mark.parametrize("seed", range(30))
def test_checkpoints_of_any_program(seed: int) -> None:
    """A checkpoint is recomputed under its own kind of autocast, whatever ran in between.

    Other regions and nodes outside of regions come in between, and uninstall().
    """
    chance = random.Random(seed)
    net, x = perceptron(), torch.randn(3, 4, requires_grad=True)

    def run() -> None:
        losses = []
        for _ in range(60):
            region = chance.choice((amp_ext.autocast, torch.autocast))
            match chance.randrange(6):
                case 0 | 1:
                    checkpointed = chance.choice([*CHECKPOINTS.values()])
                    with region("cpu", dtype=FP16):
                        losses.append((region, checkpointed(net, x).float().sum()))
                case 2:
                    with region("cpu", dtype=FP16):
                        net(x)
                case 3:
                    x * 1
                    if all(region is amp_ext.autocast for region, _ in losses):
                        amp_ext.uninstall()
                        if losses:  # another thread routes products again
                            in_a_new_thread(partial(both_kinds_of_regions, 1))
                case 4 | 5 if losses:
                    region, loss = losses.pop(chance.randrange(len(losses)))
                    with Seen() as seen:
                        loss.backward()
                    assert (seen.gemms == 0) == (region is torch.autocast)
                    assert (seen.torchs == 0) == (region is amp_ext.autocast)

    in_a_new_thread(run)


def in_a_new_thread(run: Callable[[], T]) -> T:
    """Return the result of a thread without a history."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def other_threads() -> None:
    def work() -> None:
        with amp_ext.autocast("cpu", dtype=FP16):
            torch.ones((), requires_grad=True) * 1

    for _ in range(4_200):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()


def both_kinds_of_regions(times: int, makes_nodes: bool = True) -> None:
    operand = torch.ones(1, 1, requires_grad=makes_nodes)
    for _ in range(times):
        for region in (torch.autocast, amp_ext.autocast):
            with region("cpu", dtype=FP16):
                operand @ operand


BETWEEN: dict[str, tuple[Any, Callable[[], None]]] = {
    "ours, threads": (amp_ext.autocast, other_threads),
    "ours, both kinds": (amp_ext.autocast, lambda: both_kinds_of_regions(3000)),
    "torch's, both kinds": (torch.autocast, lambda: both_kinds_of_regions(1000)),
}
"""The region of a checkpoint, and what runs between its passes: up to 1024 changes of a thread from
torch's regions to ours and back are distinguished, and older ones count as ours."""


@pytest.mark.parametrize(("region", "between"), BETWEEN.values(), ids=BETWEEN)
@every_checkpoint
def test_checkpoint_from_long_ago(run: Run, region: Any, between: Callable[[], None]) -> None:
    """A checkpoint is recomputed under its own kind of autocast after many other regions."""

    def products() -> tuple[int, int]:
        both_kinds_of_regions(3000, makes_nodes=False)
        net, x = perceptron(), torch.randn(3, 4, requires_grad=True)
        with region("cpu", dtype=FP16):
            loss = run(net, x).float().sum()
        between()
        with Seen() as seen:
            loss.backward()
        return seen.gemms, seen.torchs

    assert in_a_new_thread(products)[region is amp_ext.autocast] == 0


@every_checkpoint
def test_checkpoint_in_a_thread_whose_region_another_left(run: Run) -> None:
    """A checkpoint works in a thread whose region another thread has left.

    Another thread may close a generator with a region; torch then leaves the first thread in the
    region.
    """
    entered = amp_ext.autocast("cpu", dtype=FP16)
    net, x = nn.Linear(4, 3), torch.ones(2, 4, requires_grad=True)

    def forward() -> Tensor:
        entered.__enter__()
        in_a_new_thread(partial(entered.__exit__, None, None, None))
        with amp_ext.autocast("cpu", dtype=FP16):
            return run(net, x)

    result = in_a_new_thread(forward)
    result.backward(torch.full_like(result, 61440.0))
    assert net.weight.grad.eq(122880.0).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("script", "dtype"),
    [
        (torch.jit.trace, FP16),
        (torch.jit.trace, torch.bfloat16),
        (lambda net, x: torch.jit.script(net), FP16),  # a process keeps one dtype's casts
    ],
    ids=["trace-fp16", "trace-bf16", "script-fp16"],
)
def test_torchscript(script: Any, dtype: torch.dtype, region: Any) -> None:
    """TorchScript routes products within a region alone, and rounds to 16 bits as torch does.

    TorchScript casts by itself, biases included, and has formulas of its own for gradients once a
    program has run. Each of the two layers has two roundings of eps / 2 at most. Nothing cancels:
    all terms are positive.
    """
    net, x = perceptron(), torch.rand(3, 4, requires_grad=True)
    for parameter in net.parameters():
        parameter.data.abs_()
    program = script(net, x)
    expected = step(nn.Module.__call__, net, x, region("cpu", dtype=dtype))
    for _ in range(4):
        with region("cpu", dtype=dtype), torch.no_grad(), Seen() as seen:
            assert program(x).dtype == dtype
        assert (seen.gemms, seen.torchs) == (2, 0)
        actual = step(lambda _, x: program(x), net, x, region("cpu", dtype=dtype))
        for one, other in zip(actual, expected, strict=True):
            assert one.dtype == other.dtype
            assert (one - other).norm() <= 4 * torch.finfo(dtype).eps / 2 * other.norm()
    with torch.no_grad():
        assert_same(program(x), net(x))
        with torch.autocast("cpu", dtype=dtype), Seen() as seen:
            program(x)
    assert (seen.gemms > 0) == (region is torch.autocast)
