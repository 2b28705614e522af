"""Test whole networks: checkpoints, TorchScript and function transforms."""

from __future__ import annotations

import concurrent.futures
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import amp_ext
from autocast_cases import LOW, Seen
from cases import assert_same

FP16 = torch.float16
every_dtype = pytest.mark.parametrize("dtype", LOW, ids=["fp16", "bf16"])


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def run_checkpoint(net: nn.Module, x: Tensor, reentrant: bool) -> Tensor:
    return checkpoint(net, x, use_reentrant=reentrant)


# How a network is prepared, and how it is called.
WAYS: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "eager": (lambda net, x: net, lambda net, x: net(x)),
    "checkpoint": (lambda net, x: net, lambda net, x: run_checkpoint(net, x, False)),
    "reentrant checkpoint": (lambda net, x: net, lambda net, x: run_checkpoint(net, x, True)),
    "nested checkpoints": (
        lambda net, x: net,
        lambda net, x: run_checkpoint(partial(run_checkpoint, net, reentrant=False), x, False),
    ),
    "traced": (lambda net, x: torch.jit.trace(net, x), lambda net, x: net(x)),
    "scripted": (lambda net, x: torch.jit.script(net), lambda net, x: net(x)),
}
CHECKPOINTS, SCRIPTS = [*WAYS][1:4], ("traced", "scripted")


@pytest.fixture(params=["amp_ext.autocast", "install"])
def region(request: pytest.FixtureRequest) -> Iterator[Any]:
    """amp_ext's regions, and torch's after amp_ext.install()."""
    if request.param == "amp_ext.autocast":
        yield amp_ext.autocast
        return
    amp_ext.install()
    yield torch.autocast
    amp_ext.uninstall()


def step(way: str, net: nn.Module, program: Any, x: Tensor, context: Any) -> list[Tensor]:
    """The result, and the gradients of the parameters and of the input."""
    leaves = [*net.parameters(), x]
    for leaf in leaves:
        leaf.grad = None
    with context:
        result = WAYS[way][1](program, x)
    result.float().square().mean().backward()
    return [result.detach(), *(leaf.grad for leaf in leaves)]


@every_dtype
@pytest.mark.parametrize("way", CHECKPOINTS)
def test_checkpoint(way: str, dtype: torch.dtype, region: Any) -> None:
    """The second forward pass outside the region has the routing and bits of the first."""
    net, x = perceptron(), torch.randn(3, 4, requires_grad=True)
    expected = step("eager", net, net, x, region("cpu", dtype=dtype))
    with Seen() as seen:
        actual = step(way, net, net, x, region("cpu", dtype=dtype))
    again = 2 if way.startswith("reentrant") else 1  # the last is not needed again
    assert (seen.gemms, seen.torchs) == (2 + again + 4, 0)
    for one, other in zip(actual, expected, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("seed", range(30))
def test_checkpoints_of_any_program(seed: int) -> None:
    """A checkpoint is recomputed under its own kind of autocast, whatever ran in between.

    Other regions and nodes outside of regions come in between, and uninstall() before.
    """
    chance = random.Random(seed)
    net, x = perceptron(), torch.randn(3, 4, requires_grad=True)

    def run() -> None:
        losses = []
        for _ in range(60):
            region = chance.choice((amp_ext.autocast, torch.autocast))
            match chance.randrange(6):
                case 0 | 1:
                    way = chance.choice(CHECKPOINTS)
                    with region("cpu", dtype=FP16):
                        losses.append((region, WAYS[way][1](net, x).float().sum()))
                case 2:
                    with region("cpu", dtype=FP16):
                        net(x)
                case 3:
                    x * 1
                    if not losses:
                        amp_ext.uninstall()
                case 4 | 5 if losses:
                    region, loss = losses.pop(chance.randrange(len(losses)))
                    with Seen() as seen:
                        loss.backward()
                    assert (seen.gemms == 0) == (region is torch.autocast)
                    assert (seen.torchs == 0) == (region is amp_ext.autocast)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # a thread without a history
        pool.submit(run).result()


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
@pytest.mark.parametrize("way", CHECKPOINTS)
def test_checkpoint_from_long_ago(way: str, region: Any, between: Callable[[], None]) -> None:
    """A checkpoint is recomputed under its own kind of autocast after many other regions."""

    def run() -> list[Any]:
        both_kinds_of_regions(3000, makes_nodes=False)
        net, x = perceptron(), torch.randn(3, 4, requires_grad=True)
        with region("cpu", dtype=FP16):
            loss = WAYS[way][1](net, x).float().sum()
        between()
        with Seen() as seen:
            loss.backward()
        return [seen.gemms, seen.torchs]

    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # a thread without a history
        gemms, torchs = pool.submit(run).result()
    assert (gemms, torchs)[region is amp_ext.autocast] == 0


@pytest.mark.parametrize("way", CHECKPOINTS)
def test_checkpoint_in_a_thread_whose_region_another_left(way: str) -> None:
    """A checkpoint works in a thread whose region another thread has left.

    Another thread may close a generator with a region; torch then leaves the first thread in the
    region.
    """
    entered = amp_ext.autocast("cpu", dtype=FP16)
    net, x = nn.Linear(4, 3), torch.ones(2, 4, requires_grad=True)

    def forward() -> Tensor:
        entered.__enter__()
        with concurrent.futures.ThreadPoolExecutor(1) as other:
            other.submit(entered.__exit__, None, None, None).result()
        with amp_ext.autocast("cpu", dtype=FP16):
            return WAYS[way][1](net, x)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        result = pool.submit(forward).result()
    result.backward(torch.full_like(result, 61440.0))
    assert net.weight.grad.eq(122880.0).all()


def test_checkpoint_repeated_after_uninstall() -> None:
    """A checkpoint made after uninstall() recomputes in regions of amp_ext."""
    net, x = nn.Linear(4, 3), torch.ones(2, 4, requires_grad=True)

    def forward() -> Tensor:
        with amp_ext.autocast("cpu", dtype=FP16):
            return checkpoint(net, x, use_reentrant=True)

    def run() -> None:
        x * 1  # a node before the first region
        result = forward()
        amp_ext.uninstall()
        with concurrent.futures.ThreadPoolExecutor(1) as other:
            other.submit(forward).result()
        for _ in range(2):
            net.weight.grad = None
            result.backward(torch.full_like(result, 61440.0))
            assert net.weight.grad.eq(122880.0).all()
            result = forward()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # a thread without a history
        pool.submit(run).result()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@every_dtype
@pytest.mark.parametrize("way", SCRIPTS)
def test_torchscript(way: str, dtype: torch.dtype, region: Any) -> None:
    """TorchScript routes products within a region alone, and rounds to 16 bits as torch does.

    TorchScript casts by itself, biases included, and has formulas of its own for gradients once a
    program has run. Each of the two layers has two roundings of eps / 2 at most. Nothing cancels:
    all terms are positive.
    """
    net, x = perceptron(), torch.rand(3, 4, requires_grad=True)
    for parameter in net.parameters():
        parameter.data.abs_()
    program = WAYS[way][0](net, x)
    expected = step("eager", net, net, x, region("cpu", dtype=dtype))
    for _ in range(4):
        with region("cpu", dtype=dtype), torch.no_grad(), Seen() as seen:
            assert program(x).dtype == dtype
        assert (seen.gemms, seen.torchs) == (2, 0)
        actual = step(way, net, program, x, region("cpu", dtype=dtype))
        for one, other in zip(actual, expected, strict=True):
            assert one.dtype == other.dtype
            assert (one - other).norm() <= 4 * torch.finfo(dtype).eps / 2 * other.norm()
    with torch.no_grad():
        assert_same(program(x), net(x))
        with torch.autocast("cpu", dtype=dtype), Seen() as seen:
            program(x)
    assert (seen.gemms > 0) == (region is torch.autocast)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by torch itself
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", ["vmap", "grad", "jvp"])
def test_function_transforms_are_torchs(name: str) -> None:
    """Within torch.func's transforms products are torch's, bit for bit."""
    weight, x = torch.randn(3, 4), torch.randn(5, 4)

    def loss(w: Tensor) -> Tensor:
        return F.linear(x, w).float().square().sum()

    run: dict[str, Callable[[], Tensor]] = {
        "vmap": lambda: torch.func.vmap(F.linear, (0, None))(x, weight),
        "grad": lambda: torch.func.grad(loss)(weight),
        "jvp": lambda: torch.func.jvp(loss, (weight,), (weight,))[1],
    }
    results = []
    for region in (amp_ext.autocast, torch.autocast):
        with region("cpu", dtype=FP16):
            results.append(run[name]())
    assert_same(*results)


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse": lambda t: t.to_sparse(),
    "CSR": lambda t: t.to_sparse_csr(),
    "mkldnn": lambda t: t.to_mkldnn(),
    "nested": lambda t: torch.nested.nested_tensor([t, t], layout=torch.strided),
    "jagged": lambda t: torch.nested.nested_tensor([t, t[:1]], layout=torch.jagged),
    "two tensors": lambda t: TwoTensor(t, 2 * t),
    "meta": lambda t: t.to("meta"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of features that torch calls new
@pytest.mark.parametrize("place", ["x", "weight"])
@pytest.mark.parametrize("op", [F.linear, torch.matmul])
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_other_kinds_of_tensors_are_torchs(make: Any, op: Any, place: str) -> None:
    """Products of other kinds of tensors are torch's, or torch's errors."""
    outcomes = []
    for region in (amp_ext.autocast, torch.autocast):
        tensors = {"x": torch.ones(4, 4), "weight": torch.ones(4, 4)}
        tensors[place] = make(tensors[place])
        try:
            with region("cpu", dtype=FP16):
                outcome: Any = op(*tensors.values())
            values = str(outcome.tolist()) if outcome.layout == torch.strided else None
            outcomes.append((type(outcome), outcome.dtype, outcome.layout, outcome.device, values))
        except Exception as error:  # torch defines the expected error
            outcomes.append((type(error), str(error)))
    assert outcomes[0] == outcomes[1]
