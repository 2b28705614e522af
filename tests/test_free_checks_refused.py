"""Gradients that products do not judge when they write them, and passes of several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from amp_ext import _C, ops
from amp_ext.nn import Linear
from free_cases import INF, Training, cuda_kernels
from test_accumulate_grad import hooked_accumulator, hooked_after, hooked_before
from twins import DEVICES


@pytest.fixture(autouse=True)
def _own_kernels() -> Iterator[None]:
    with cuda_kernels():
        yield


@pytest.mark.parametrize(
    "change",
    [
        hooked_before,
        hooked_after,
        hooked_accumulator("register_hook"),
        hooked_accumulator("register_prehook"),
    ],
)
@pytest.mark.parametrize("accumulate", [False, True])
def test_hooks(change: Callable[[Linear], None], accumulate: bool) -> None:
    """They may write through .data, as data-parallel wrappers do."""
    training = Training(network=Linear(6, 5, accumulate_grad=accumulate))
    change(training.layer)
    training.backward()
    assert training.check() == (0, False)


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_weight_used_twice(accumulate: bool) -> None:
    training = Training(network=Linear(6, 5, bias=False, accumulate_grad=accumulate))
    (training.loss() + training.loss()).backward()
    assert training.check() == (0, False)
    training.backward()
    assert training.check() == (int(accumulate), False)


@pytest.mark.parametrize("accumulate", [False, True])
def test_sums_of_uses(accumulate: bool) -> None:
    """Of which each is finite, and the sum is not."""
    training = Training(network=Linear(6, 5, bias=False, accumulate_grad=accumulate))
    weight = training.layer.weight
    training.scaler.scale(torch.ones(()))
    assert _C.judges_gradients()
    for value, bad in ((3e38, True), (1.0, False)):
        training.optimizer.zero_grad()
        outs = [ops.linear(training.x, weight, accumulate_grad=accumulate) for _ in range(2)]
        torch.stack([out[0, 0] for out in outs]).backward(torch.full((2,), value))
        assert training.check() == (0, bad)


class Spoils(TorchDispatchMode):
    """Writes infinities to all gradients of a shape, uncounted."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.shape == (5, 6):
            out.mul_(INF)
        return out


def test_dispatch_modes() -> None:
    training = Training()
    loss = training.loss()
    with Spoils():
        loss.backward()
    assert training.check() == (0, True)


@pytest.mark.parametrize("accumulate", [False, True])
def test_sums_of_passes(accumulate: bool) -> None:
    """What is judged is the whole sum, or nothing."""
    for first, second, bad in ((3e38, 3e38, True), (INF, 1.0, True), (1.0, 1.0, False)):
        training = Training(network=Linear(6, 5, bias=False, accumulate_grad=accumulate))
        for value in (first, second):
            out = ops.linear(training.x, training.layer.weight, accumulate_grad=accumulate)
            training.scaler.scale(out[0, 0]).backward(torch.tensor(value / 4))
        assert training.check() == (int(accumulate), bad)


def test_retained_graph() -> None:
    training = Training()
    loss = training.loss()
    loss.backward(retain_graph=True)
    loss.backward()
    assert training.check() == (0, False)


def test_other_passes() -> None:
    training = Training()
    for options in ({"inputs": [training.layer.weight]}, {"create_graph": True}):
        training.optimizer.zero_grad()
        training.backward(**options)
        assert training.check() == (0, False)
        training.layer.weight.grad = None
    (grad,) = torch.autograd.grad(training.loss(), training.layer.weight)
    training.layer.weight.grad = grad
    assert training.check() == (0, False)


def test_compiled_and_transformed() -> None:
    torch._dynamo.reset()
    training = Training()
    layer = training.layer
    training.layer = torch.compile(layer, fullgraph=True, backend="aot_eager")
    training.backward()
    assert training.check() == (0, False)
    layer.weight.grad = torch.func.grad(lambda w: ops.linear(training.x, w).sum())(
        layer.weight.detach()
    )
    assert training.check() == (0, False)
    for grad in torch.vmap(torch.func.grad(lambda w: ops.linear(training.x, w).sum()))(
        layer.weight.detach().expand(2, 5, 6)
    ):
        layer.weight.grad = grad
        assert training.check() == (0, False)


def test_threads() -> None:
    """Each trains a network of its own, and all ask at once."""
    trainings = [Training(network=Linear(6, 5, bias=False)) for _ in range(4)]
    trainings[0].scaler.scale(torch.ones(()))
    found: list[tuple[int, bool]] = []

    def run(training: Training, bad: bool) -> None:
        for _ in range(200):
            training.optimizer.zero_grad()
            training.spoil() if bad else training.backward()
            found.append((*training.check(), bad))

    workers = [
        threading.Thread(target=run, args=(training, index % 2 == 1))
        for index, training in enumerate(trainings)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert set(found) == {(1, False, False), (1, True, True)}


@pytest.mark.parametrize("device", DEVICES[1:])
def test_captured_products_and_checks(device: str) -> None:
    """A flag is cleared once; a graph is replayed."""
    training = Training(device, Linear(6, 5, bias=False, accumulate_grad=True))
    training.backward()
    graph = torch.cuda.CUDAGraph()
    training.layer.weight.grad.zero_()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        training.backward()
    assert training.check() == (0, False)
    training.backward()
    with torch.cuda.graph(graph):
        found = training.scaler._check_inf_per_device(training.optimizer)
    training.grad.data.fill_(INF)
    graph.replay()
    assert all(bool(flag) for flag in found.values())


@pytest.mark.parametrize("device", DEVICES[1:])
def test_other_streams(device: str) -> None:
    training = Training(device)
    for bad in (False, True) * 20:
        training.optimizer.zero_grad()
        with torch.cuda.stream(torch.cuda.Stream()):
            training.spoil() if bad else training.backward()
            torch.cuda.current_stream().synchronize()
        assert training.check() == (1, bad)
