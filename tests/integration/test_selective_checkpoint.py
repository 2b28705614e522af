"""Test selective checkpointing: a policy for torch's product also saves amp_ext's."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import amp_ext
from autocast_cases import Seen

BF16 = torch.bfloat16
aten = torch.ops.aten


class Block(nn.Module):
    """A block of attention with products of each kind, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).mT
        attended = torch.baddbmm(x.to(scores.dtype), scores.softmax(-1).to(scores.dtype), x)
        return x + self.mlp(attended).float()


def every_other_product() -> Callable[..., CheckpointPolicy]:
    """Save every other call with a shape of torch's arguments, as policies of trainers do."""
    seen = {"forward": 0, "recompute": 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is not aten.addmm.default or args[1].dim() != 2 or args[2].shape[0] != 8:
            return CheckpointPolicy.PREFER_RECOMPUTE
        mode = "recompute" if context.is_recompute else "forward"
        seen[mode] += 1
        saves = seen[mode] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def all_but_addmm(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op is aten.addmm.default:
        return CheckpointPolicy.MUST_RECOMPUTE
    return CheckpointPolicy.PREFER_SAVE


POLICIES: dict[str, Callable[[], Any]] = {
    "none": list,
    "mm, addmm": lambda: [aten.mm.default, aten.addmm.default],
    "bmm, baddbmm": lambda: [aten.bmm.default, aten.baddbmm.default],
    "every other": every_other_product,
    "all but addmm": lambda: all_but_addmm,
}


def trained(
    blocks: nn.Module, region: Callable[[], Any], policy: Callable[[], Any] | None
) -> tuple[int, list[Tensor]]:
    """Return the number of products of a step, and the gradients."""
    blocks.zero_grad()
    x = torch.linspace(-1.0, 1.0, 64).reshape(2, 4, 8)
    with Seen() as seen:
        with region():
            for block in blocks:
                if policy is None:
                    x = block(x)
                else:
                    contexts = partial(create_selective_checkpoint_contexts, policy())
                    x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        x.square().sum().backward()
    return seen.torchs + seen.gemms, [param.grad.clone() for param in blocks.parameters()]


def blocks() -> nn.Module:
    return nn.ModuleList([Block() for _ in range(3)])


@pytest.mark.parametrize("policy", [None, *POLICIES])
def test_as_many_products_as_torch(policy: str | None) -> None:
    """A region recomputes as torch does, also inputs of activations."""
    make, net = policy and POLICIES[policy], blocks()
    theirs, ours = (partial(kind.autocast, "cpu", dtype=BF16) for kind in (torch, amp_ext))
    count, gradients = trained(net, ours, make)
    assert count == trained(net, theirs, make)[0]
    assert all(map(torch.equal, gradients, trained(net, ours, None)[1]))


def test_ops_of_ours_can_be_named() -> None:
    net, region = blocks(), partial(amp_ext.autocast, "cpu", BF16)
    unchecked, _ = trained(net, region, None)
    assert trained(net, region, lambda: [torch.ops.amp_ext.gemm.default])[0] == unchecked


@pytest.mark.parametrize(
    ("product", "shapes"),
    [
        (torch.matmul, [(4, 3), (3,)]),
        (lambda x, w: nn.functional.conv2d(x.mT, w), [(2, 3, 4, 4), (5, 3, 1, 1)]),
    ],
)
def test_a_saved_product_may_not_change(product: Any, shapes: list[tuple[int, ...]]) -> None:
    """A change in place of a saved product is an error, not a second change."""
    x, weight = (torch.ones(shape, requires_grad=True) for shape in shapes)
    saves = partial(create_selective_checkpoint_contexts, [torch.ops.amp_ext.gemm.default])
    with amp_ext.autocast("cpu", BF16):
        result = checkpoint(
            lambda: product(x, weight).mul_(2).square(), use_reentrant=False, context_fn=saves
        )
    with pytest.raises(RuntimeError, match="has been mutated"):
        result.sum().backward()
