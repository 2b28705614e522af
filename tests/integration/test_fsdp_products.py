"""Test layers under FSDP2 or DDP on two ranks against one process in FP32.

All numbers are integers times powers of two that FP16 represents, except for gradients of weights:
these are sums beyond its range. Each step changes every parameter, so that a copy of an old one
shows.
"""

import copy
from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import amp_ext
from autocast_cases import Seen
from ranks import Cases, mesh_of_all, on_ranks

FP16, FP32 = torch.float16, torch.float32
region = partial(amp_ext.autocast, "cpu", FP16)
CASES = Cases(mesh_of_all)
case = CASES.add


def signs() -> Tensor:
    return torch.randint(0, 2, (8,)) * 2.0 - 1


def permutation() -> Tensor:
    return torch.eye(8)[torch.randperm(8)] * signs()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        for param in self.parameters():
            param.data.copy_(signs() if param.dim() == 1 else permutation() + permutation())

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.second(self.first(x)))


def network() -> nn.Module:
    return nn.Sequential(Block(), Block())


def sharded(mesh: Any, net: nn.Module, **options: Any) -> nn.Module:
    net = copy.deepcopy(net)
    for part in (*net, net):
        fully_shard(part, mesh=mesh, **options)
    return net


def batches(mesh: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return two batches of all ranks, and this rank's parts."""
    whole = [torch.randint(-1, 2, (2 * 64, 8)).float() for _ in range(2)]
    return whole, [x.chunk(2)[mesh.get_local_rank()] for x in whole]


def loss_of(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).float().sum() * 2.0**10


def reference(net: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """Return the gradients of one process, averaged over ranks, after each step."""
    sum(loss_of(net, x) for x in batches).backward()
    found = [param.grad / 2 for param in net.parameters()]
    update(net)
    assert all(grad.abs().max() > 65504 for grad in found if grad.dim() == 2)
    return found


@torch.no_grad()
def update(net: nn.Module) -> None:
    for param in net.parameters():
        param.neg_()
        param.grad = None


def assert_same(net: nn.Module, expected: list[Tensor]) -> None:
    for (name, param), grad in zip(net.named_parameters(), expected, strict=True):
        full = param.grad.full_tensor() if hasattr(param.grad, "full_tensor") else param.grad
        assert torch.equal(full, grad), name
    update(net)


def backward_of(net: nn.Module, x: Tensor) -> None:
    """Add gradients as in training."""
    with region():
        loss = loss_of(net, x)
    loss.backward()


# ---- FSDP2 ---------------------------------------------------------------------------------------


def synchronized(net: nn.Module, first: Tensor, second: Tensor) -> None:
    """FSDP2 removes each gradient after its pass."""
    backward_of(net, first)
    backward_of(net, second)


def unsynchronized(net: nn.Module, first: Tensor, second: Tensor) -> None:
    """Between synchronized passes, autograd keeps the gradient of the gathered weight."""
    net.set_requires_gradient_sync(False)
    backward_of(net, first)
    net.set_requires_gradient_sync(True)
    backward_of(net, second)


def in_one_region(net: nn.Module, first: Tensor, second: Tensor) -> None:
    """In one region, the second forward pass gathers the weights that the first one freed."""
    with region():
        losses = [loss_of(net, first), loss_of(net, second)]
    sum(losses).backward()


def assert_trains(mesh: Any, net: nn.Module, plain: nn.Module) -> None:
    """Assert that a sharded network trains as a plain one."""
    for way in (synchronized, unsynchronized, in_one_region):
        given, own = batches(mesh)
        way(net, *own)
        assert_same(net, reference(plain, given))


def fsdp(mesh: Any, reshard: bool) -> None:
    plain = network()
    assert_trains(mesh, sharded(mesh, plain, reshard_after_forward=reshard), plain)


for reshard in (True, False):
    case(fsdp, reshard)


@case
def ops(mesh: Any) -> None:
    """The ops, with their casts, equal the ops of one process; torch runs no product."""
    plain = network()
    found = []
    for net in (plain, sharded(mesh, plain)):
        with Seen() as seen, region():
            loss_of(net, batches(mesh)[1][0]).backward()
        assert seen.torchs == 0
        of_ours = Counter(op for op in seen.ops if op.namespace == "amp_ext")
        found.append((of_ours, seen.casts))
    assert found[0] == found[1]
    assert found[0][0].total() == 2 * (2 + 2 + 2 + 2 + 4) - 1  # x has no gradient


def wide_gradients(module: nn.Module, args: Any) -> None:
    for param in module.parameters():
        param.grad_dtype = FP32


@case
def param_dtype(mesh: Any) -> None:
    """Weights gathered in FP16 have FP32 gradients if these are requested."""
    plain = network()
    policy = MixedPrecisionPolicy(param_dtype=FP16, reduce_dtype=FP32)
    net = sharded(mesh, plain, mp_policy=policy)
    for part in (net, *net):
        part.register_forward_pre_hook(wide_gradients)
    assert_trains(mesh, net, plain)


def checkpoints(mesh: Any, outside: bool) -> None:
    """Checkpoints inside and around sharded modules gather again in the second forward pass."""
    plain = network()
    net = sharded(mesh, plain if outside else nn.Sequential(*map(checkpoint_wrapper, plain)))
    if outside:
        net = nn.Sequential(*map(checkpoint_wrapper, net))
    for _ in range(2):
        given, own = batches(mesh)
        with region():
            losses = [loss_of(net, x) for x in own]
        with Seen() as seen:
            sum(losses).backward()
        assert seen.torchs == 0
        assert_same(net, reference(plain, given))


for outside in (False, True):
    case(checkpoints, outside)


# ---- DDP -----------------------------------------------------------------------------------------


@case
def ddp(mesh: Any) -> None:
    """DDP's hooks are present also in passes without a reduction."""
    plain = network()
    wrapped = nn.parallel.DistributedDataParallel(
        copy.deepcopy(plain), gradient_as_bucket_view=True
    )
    for _ in range(2):
        given, (first, second) = batches(mesh)
        with wrapped.no_sync():
            backward_of(wrapped, first)
        backward_of(wrapped, second)
        assert_same(wrapped, reference(plain, given))


errors, test_two_ranks = on_ranks(__name__, CASES, 2)
