"""Test that products of DTensors on two ranks equal one process's, bit for bit.

All numbers are small integers, so that every sum is exact in every dtype and order.
"""

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as tp

import amp_ext
from amp_ext import ops
from autocast_cases import Seen
from ranks import Cases, mesh_of_all, on_ranks

CASES = Cases(mesh_of_all)
case = CASES.add


def integers(*shape: int) -> Tensor:
    return torch.randint(-1, 2, shape).float()


def whole(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


# ---- the ops -------------------------------------------------------------------------------------


def assert_same(mesh: Any, call: Callable[..., Any], tensors: list[Tensor], *fixed: Any) -> None:
    """Assert equal results and gradients, for the first two tensors in all placements."""
    expected, gradients = differentiated(call, [*tensors])
    placements = [[*map(Shard, range(tensor.dim())), Replicate()] for tensor in tensors[:2]]
    placements[0].append(Partial())
    for chosen in itertools.product(*placements):
        placed = [*chosen, *fixed]
        given = [
            distribute_tensor(tensor, mesh, [Replicate() if place.is_partial() else place])
            for tensor, place in zip(tensors, placed, strict=True)
        ]
        if placed[0].is_partial():
            local = tensors[0] if mesh.get_local_rank() == 0 else torch.zeros_like(tensors[0])
            given[0] = type(given[0]).from_local(local, mesh, [Partial()], run_check=False)
        out, grads = differentiated(call, given)
        for ours, theirs in zip([out, *grads], [expected, *gradients], strict=True):
            assert torch.equal(ours, theirs), chosen


def differentiated(call: Callable[..., Any], tensors: list[Tensor]) -> tuple[Any, Any]:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = call(*leaves)
    (out * out.detach()).sum().backward()
    return whole(out.detach()), [whole(leaf.grad) for leaf in leaves]


def with_c(a: Tensor, b: Tensor, c: Tensor, bias: Tensor) -> Tensor:
    return ops.gemm(a, b, trans_b=True, c=c, beta=2.0, bias=bias)


@case
def gemm(mesh: Any) -> None:
    """gemm also multiplies dimensions that two ranks share unevenly."""
    assert_same(mesh, ops.gemm, [integers(3, 4), integers(4, 5)])
    assert_same(mesh, ops.gemm, [integers(2, 3, 4), integers(4, 4)])
    assert_same(mesh, ops.gemm, [integers(2, 4, 4), integers(2, 4, 4)])
    addends = [integers(1, 4), integers(4)]
    assert_same(mesh, with_c, [integers(3, 4), integers(4, 4), *addends], Replicate(), Shard(0))
    summed = partial(ops.gemm, trans_a=True, sum_batch=True)
    assert_same(mesh, summed, [integers(2, 4, 3), integers(2, 4, 5)])


def in_region(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A product of torch's within a region runs on gemm."""

    def run(*tensors: Tensor) -> Tensor:
        with amp_ext.autocast("cpu", torch.float16), Seen() as seen:
            out = product(*tensors)
        assert seen.gemms and not seen.torchs
        return out

    return run


@case
def products_of_torch(mesh: Any) -> None:
    layer = [integers(2, 3, 4), integers(6, 4), integers(6)]
    assert_same(mesh, in_region(nn.functional.linear), layer, Shard(0))
    assert_same(mesh, in_region(torch.mm), [integers(4, 4), integers(4, 6)])
    assert_same(mesh, in_region(torch.bmm), [integers(2, 4, 4), integers(2, 4, 4)])
    assert_same(mesh, in_region(torch.matmul), [integers(2, 4, 3, 4), integers(2, 4, 4, 2)])
    assert_same(mesh, in_region(torch.matmul), [integers(4), integers(4, 6)])
    addend = [integers(4, 4), integers(4, 6), integers(6)]
    assert_same(mesh, in_region(lambda a, b, c: torch.addmm(c, a, b)), addend, Replicate())


@case
def updates_within_a_region(mesh: Any) -> None:
    """A weight is cast once until it is written. DTensor does not count updates of lists."""
    x = distribute_tensor(torch.eye(4), mesh, [Shard(1)])
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)]))
    with amp_ext.autocast("cpu", torch.float16):
        for expected in (1.0, 2.0, 3.0):
            with Seen() as seen:
                outs = [nn.functional.linear(x, weight) for _ in range(2)]
            assert seen.casts == 2 + 1  # x at each use
            assert all(whole(out).eq(expected).all() for out in outs)
            with torch.no_grad():
                if expected == 1:
                    weight.add_(1)
                else:
                    torch._foreach_add_([weight], 1)
                    torch.clear_autocast_cache()


@case
def arguments(mesh: Any) -> None:
    """Wrong arguments raise on every rank, before any communication."""
    a = distribute_tensor(integers(2, 7), mesh, [Shard(1)])
    with pytest.raises(RuntimeError, match="amp_ext::gemm: b must be a DTensor"):
        ops.gemm(a, integers(7, 2))
    with pytest.raises(RuntimeError, match="8"):
        ops.gemm(a, distribute_tensor(integers(8, 2), mesh, [Replicate()]))
    with pytest.raises(RuntimeError, match="gemm_accumulate_"):
        ops.gemm_accumulate_(torch.zeros(2, 2), a, a, trans_b=True)
    weight = distribute_tensor(integers(3, 7), mesh, [Shard(1)])
    with torch.inference_mode():
        assert torch.equal(whole(ops.gemm(a, weight, trans_b=True)), whole(a) @ whole(weight).mT)


# ---- layers --------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
        for param in self.parameters():
            param.data.copy_(integers(*param.shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.second(self.first(x).relu()).clamp(-1.0, 1.0))


def parallelized(net: nn.Module, mesh: Any) -> nn.Module:
    """Shard the layers; sequences are sharded between the second and the third."""
    plan = {
        "first": tp.ColwiseParallel(),
        "second": tp.RowwiseParallel(output_layouts=Shard(1)),
        "mlp.0": tp.ColwiseParallel(input_layouts=Shard(1)),
        "mlp.2": tp.RowwiseParallel(),
    }
    return tp.parallelize_module(copy.deepcopy(net), mesh, plan)


REGIONS = {
    "no": nullcontext,
    "torch's": partial(torch.autocast, "cpu", torch.bfloat16),
    "our": partial(amp_ext.autocast, "cpu", torch.float16),
}


def layers(mesh: Any, region: str) -> None:
    """Outputs, and gradients of two passes, equal one process's, also beyond FP16's range."""
    nets, x, found = [Net()], integers(16, 4, 8), []
    factor = 2.0**12 if region == "our" else 1.0
    nets.append(parallelized(nets[0], mesh))
    for net in nets:
        inputs = x.clone().requires_grad_()
        for _ in range(2):
            with REGIONS[region]():
                out = net(inputs)
            (out.float().sum() * factor).backward()
        found.append([out.detach(), inputs.grad, *(whole(p.grad) for p in net.parameters())])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
    assert all(grad.count_nonzero() for grad in found[0])
    if factor > 1:
        assert all(p.grad.abs().max() > 65504 for p in nets[0].parameters() if p.dim() == 2)
    assert all(p.grad.placements == p.placements for p in nets[1].parameters())


for region in REGIONS:
    case(layers, region)


@case
def one_output_of_two_ranks(mesh: Any) -> None:
    """The bias of a single output is on one rank, and so is its gradient."""
    x, nets = integers(16, 4, 8), [nn.Linear(8, 1), nn.Linear(8, 1)]
    tp.parallelize_module(nets[1], mesh, tp.ColwiseParallel())
    for net in nets:
        with amp_ext.autocast("cpu", torch.float16):
            net(x).sum().backward()
    grads = [[whole(p.grad) for p in net.parameters()] for net in nets]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*grads, strict=True))


errors, test_two_ranks = on_ranks(__name__, CASES, 2)
