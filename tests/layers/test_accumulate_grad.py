"""Weight gradients that a backward pass adds straight to .grad, and when it must not."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import amp_ext
from amp_ext import ops
from amp_ext.nn import MLP, GatedMLP, Linear
from cases import assert_same, integers
from executors import Executor, against_oracle

FP16, FP32 = torch.float16, torch.float32


class Ops(TorchDispatchMode):
    """Counts products that are added in place."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.amp_ext.gemm_accumulate_.default
        return func(*args, **(kwargs or {}))


def whole(layer: nn.Module) -> nn.Module:
    """Give a module parameters and gradients of integers, whose sums are exact in any order."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(integers(tuple(parameter.shape), FP32, parameter.device))
            parameter.grad = integers(tuple(parameter.shape), FP32, parameter.device)
    return layer


def linear(executor: Executor) -> Linear:
    return whole(Linear(6, 5, device=executor.device, accumulate_grad=True))


def rows(executor: Executor) -> Tensor:
    return integers((4, 3, 6), FP32, executor.device)


def backward(layer: Linear, loss: Callable[[], Tensor], **options: Any) -> int:
    """Run a backward pass; return how many products were added in place."""
    with Ops() as seen:
        loss().backward(**options)
    return seen.count


@against_oracle
@pytest.mark.parametrize("region", [contextlib.nullcontext, torch.autocast, amp_ext.autocast])
@pytest.mark.parametrize(
    "make",
    [
        lambda **o: Linear(6, 5, **o),
        lambda **o: MLP(6, 5, 4, **o),
        lambda **o: GatedMLP(6, 5, 4, **o),
    ],
)
def test_is_what_autograd_does(
    executor: Executor, make: Callable[..., nn.Module], region: Callable[..., Any]
) -> None:
    """The same gradients as without, in the same memory, and as many products in place."""
    layers = [make(device=executor.device, accumulate_grad=added) for added in (True, False)]
    whole(layers[0])
    layers[1].load_state_dict(layers[0].state_dict())
    for mine, other in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
        other.grad = mine.grad.clone()
    memory = [parameter.grad.data_ptr() for parameter in layers[0].parameters()]
    x = rows(executor)
    counts = []
    for layer in layers:
        for _ in range(2):
            arguments = () if region is contextlib.nullcontext else (executor.device.type, FP16)
            with region(*arguments):
                out = layer(x)
            with Ops() as seen:
                (out.float() * 2).sum().backward()
            counts.append(seen.count)
    weights = sum(p.dim() == 2 for p in layers[0].parameters())
    assert counts == [weights, weights, 0, 0]
    assert [parameter.grad.data_ptr() for parameter in layers[0].parameters()] == memory
    for mine, other in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-6, atol=1e-4)


@against_oracle
@pytest.mark.parametrize("dtype", [FP16, torch.bfloat16])
@pytest.mark.parametrize("region", [contextlib.nullcontext, amp_ext.autocast])
@pytest.mark.parametrize(
    ("make", "grad"),
    [
        (lambda **o: Linear(6, 5, **o), 2.0**15),
        (lambda **o: MLP(6, 5, 4, activation="relu", **o), 2.0**12),
    ],
    ids=["Linear", "MLP"],
)
def test_fp32_gradients_of_16_bit_weights(
    executor: Executor,
    make: Callable[..., nn.Module],
    grad: float,
    region: Callable[..., Any],
    dtype: torch.dtype,
) -> None:
    """Where their grad_dtype is float32: added in place, beyond what float16 represents. All that
    is rounded to 16 bits is an integer, or that times 2**12, and exact."""
    layers = [make(device=executor.device, accumulate_grad=added) for added in (True, False)]
    layers[1].load_state_dict(whole(layers[0]).state_dict())
    x = rows(executor).to(dtype)
    counts = []
    for layer in layers:
        layer.to(dtype)
        for parameter in layer.parameters():
            parameter.grad = None
            parameter.grad_dtype = FP32
        for _ in range(2):
            with region(
                *(() if region is contextlib.nullcontext else (executor.device.type, dtype))
            ):
                out = layer(x)
            with Ops() as seen:
                out.backward(torch.full_like(out, grad))
            counts.append(seen.count)
    weights = sum(parameter.dim() == 2 for parameter in layers[0].parameters())
    assert counts == [0, weights, 0, 0]
    for mine, other in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
        assert mine.grad.dtype == FP32
        assert mine.grad.equal(other.grad)
        assert mine.dim() == 1 or 65504 < mine.grad.abs().max() < math.inf


def hooked_before(layer: Linear) -> None:
    layer.weight.register_hook(lambda grad: grad * 2)


def hooked_after(layer: Linear) -> None:
    layer.weight.register_post_accumulate_grad_hook(lambda parameter: None)


def hooked_accumulator(method: str) -> Callable[[Linear], None]:
    """Hook in as data-parallel wrappers do."""

    def change(layer: Linear) -> None:
        layer.kept = layer.weight.view_as(layer.weight).grad_fn.next_functions[0][0]
        getattr(layer.kept, method)(lambda *_: None)

    return change


def replaced(make: Callable[[Tensor], Tensor | None]) -> Callable[[Linear], None]:
    def change(layer: Linear) -> None:
        layer.weight.grad = make(layer.weight.grad)

    return change


def shared_with_weight(layer: Linear) -> None:
    layer.weight.grad = layer.weight.detach()


def transposed_weight(layer: Linear) -> None:
    layer.weight = nn.Parameter(layer.weight.detach().mT.contiguous().mT)
    layer.weight.grad = torch.ones_like(layer.weight)


def weight_of(dtype: torch.dtype) -> Callable[[Linear], None]:
    def change(layer: Linear) -> None:
        layer.weight = nn.Parameter(layer.weight.detach().to(dtype))
        layer.weight.grad = torch.ones_like(layer.weight)

    return change


def not_a_leaf(layer: Linear) -> None:
    parameter = layer.weight
    del layer.weight
    layer.origin = parameter
    layer.weight = parameter * 1


CHANGES: dict[str, Callable[[Linear], None]] = {
    "hook": hooked_before,
    "post-accumulate hook": hooked_after,
    "accumulator hook": hooked_accumulator("register_hook"),
    "accumulator prehook": hooked_accumulator("register_prehook"),
    "no grad": replaced(lambda grad: None),
    "strided grad": replaced(lambda grad: grad.mT.contiguous().mT),
    "sparse grad": replaced(lambda grad: grad.to_sparse()),
    "grad with a graph": replaced(lambda grad: grad.clone().requires_grad_() * 1),
    "grad is the weight": shared_with_weight,
    "transposed weight": transposed_weight,
    "fp64 weight": weight_of(torch.float64),
    "fp16 weight": weight_of(FP16),
    "not a leaf": not_a_leaf,
}


@against_oracle
@pytest.mark.parametrize("name", CHANGES)
def test_refusals(executor: Executor, name: str) -> None:
    """Each has autograd add the gradient, as for a layer without accumulate_grad."""
    results = []
    for asks in (True, False):
        torch.manual_seed(1)
        layer = linear(executor)
        layer.accumulate_grad = asks
        CHANGES[name](layer)
        x = rows(executor)
        assert backward(layer, lambda: (layer(x) * 3).sum()) == 0  # noqa: B023
        leaf = getattr(layer, "origin", layer.weight)
        grad = leaf.grad
        results.append(grad.to_dense() if grad.layout != torch.strided else grad)
    assert_same(*results)


def freeze(layer: Linear, out: Tensor) -> None:
    layer.weight.requires_grad_(False)


def hook_the_product(layer: Linear, out: Tensor) -> None:
    def double(gradients: Any, _: Any) -> Any:
        return tuple(grad if grad is None else 2 * grad for grad in gradients)

    out.grad_fn.register_hook(double)


@against_oracle
@pytest.mark.parametrize("change", [freeze, hook_the_product])
def test_changes_between_forward_and_backward(
    executor: Executor, change: Callable[[Linear, Tensor], None]
) -> None:
    results = []
    for asks in (True, False):
        torch.manual_seed(1)
        layer, x = linear(executor), rows(executor)
        layer.accumulate_grad = asks
        out = layer(x)
        change(layer, out)
        with Ops() as seen:
            out.sum().backward()
        assert seen.count == 0
        results.append(layer.weight.grad)
    assert_same(*results)


@against_oracle
def test_anomaly_mode_sees_the_gradient(executor: Executor) -> None:
    layer, x = linear(executor), rows(executor)
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        out = layer(x.fill_(math.nan)).nan_to_num().sum()
        with pytest.raises(RuntimeError, match="GemmBackward' returned nan values in its 1th"):
            out.backward()


@against_oracle
def test_a_product_that_is_the_root(executor: Executor) -> None:
    """As in a stage of a pipeline, which is given the gradient of its result."""
    layer, x = linear(executor), rows(executor)
    before = layer.weight.grad.clone()
    (grad,) = torch.autograd.grad(layer(x).sum(), layer.weight)
    out = layer(x)
    with Ops() as seen:
        out.backward(torch.ones_like(out))
    assert seen.count == 1
    assert_same(layer.weight.grad, before + grad)


@against_oracle
def test_only_passes_of_backward(executor: Executor) -> None:
    layer, x = linear(executor), rows(executor)
    before = layer.weight.grad.clone()
    with Ops() as seen:
        (grad,) = torch.autograd.grad(layer(x).sum(), layer.weight)
        assert seen.count == 0
        assert_same(layer.weight.grad, before)
        layer(x).sum().backward(inputs=[layer.weight])
        assert seen.count == 0
        assert_same(layer.weight.grad, before + grad)
        layer(x).sum().backward(create_graph=True)
        assert seen.count == 0
        assert_same(layer.weight.grad.detach(), before + 2 * grad)


@against_oracle
@pytest.mark.parametrize("times", [2, 3])
def test_a_weight_used_more_than_once(executor: Executor, times: int) -> None:
    layer, x = linear(executor), rows(executor)
    before = layer.weight.grad.clone()
    (grad,) = torch.autograd.grad(layer(x).sum(), layer.weight)
    assert backward(layer, lambda: sum(layer(x).sum() for _ in range(times))) == 0
    assert_same(layer.weight.grad, before + times * grad)
    assert backward(layer, lambda: layer(x).sum() + layer.weight.sum()) == 0
    assert backward(layer, lambda: layer(x).sum()) == 1


@against_oracle
def test_tied_layers_under_autocast(executor: Executor) -> None:
    """The FP16 copy of a shared weight stands for one leaf."""
    first, second = linear(executor), linear(executor)
    second.weight = first.weight
    x = rows(executor)
    with amp_ext.autocast(executor.device.type, dtype=FP16):
        loss = (first(x).float() + second(x).float()).sum()
    assert backward(first, lambda: loss) == 0


@against_oracle
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(executor: Executor, reentrant: bool) -> None:
    layer, x = linear(executor), rows(executor).requires_grad_()
    before = layer.weight.grad.clone()
    (grad,) = torch.autograd.grad(layer(x).sum(), layer.weight)
    checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    assert_same(layer.weight.grad, before + grad)


@against_oracle
def test_gradient_that_shares_memory_with_an_operand(executor: Executor) -> None:
    memory = integers((5 * 6 + 12 * 6,), FP32, executor.device)
    layer = linear(executor)
    layer.weight.grad = memory[:30].view(5, 6)
    x = memory[30:].view(12, 6)
    assert backward(layer, lambda: layer(x).sum()) == 0


@against_oracle
def test_threads_of_one_model(executor: Executor) -> None:
    """Every pass of every thread is in the sum."""
    layer, x = linear(executor), rows(executor)
    layer.weight.grad.zero_()
    (grad,) = torch.autograd.grad(layer(x).sum(), layer.weight)

    def passes() -> None:
        for _ in range(25):
            layer(x).sum().backward()

    workers = [threading.Thread(target=passes) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert_same(layer.weight.grad, 100 * grad)


def test_data_parallel(tmp_path: Any) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for view in (False, True):
            layer = whole(Linear(6, 5, accumulate_grad=True))
            layer.zero_grad()
            wrapped = DistributedDataParallel(layer, gradient_as_bucket_view=view)
            for _ in range(3):
                assert backward(layer, lambda: wrapped(torch.ones(4, 6)).sum()) == 0  # noqa: B023
            assert layer.weight.grad.tolist() == [[12.0] * 6] * 5
    finally:
        dist.destroy_process_group()


@against_oracle
def test_compiled_programs_return_gradients(executor: Executor) -> None:
    torch._dynamo.reset()
    layer, x = linear(executor), rows(executor)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    before = layer.weight.grad.clone()
    (grad,) = torch.autograd.grad(layer(x).sum(), layer.weight)
    loss = compiled(x).sum()
    assert backward(layer, lambda: loss) == 0
    assert_same(layer.weight.grad, before + grad)


@against_oracle
def test_transforms_return_gradients(executor: Executor) -> None:
    layer, x = linear(executor), rows(executor)
    before = layer.weight.grad.clone()

    def loss(weight: Tensor) -> Tensor:
        return ops.linear(x, weight, accumulate_grad=True).sum()

    with Ops() as seen:
        grad = torch.func.grad(loss)(layer.weight.detach())
    assert seen.count == 0
    assert_same(layer.weight.grad, before)
    assert_same(grad, torch.autograd.grad(layer(x).sum(), layer.weight)[0])
