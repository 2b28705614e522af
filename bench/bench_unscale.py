"""unscale_: multiply a list of gradients by a scalar in place and look for infinities and NaNs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from amp_ext import ops, testing
from registry import BASELINE, OURS, Case, Op, Provider, Trial, check

KI, MI = 1 << 10, 1 << 20
L2_MULTIPLE = 3
MAX_COPIES = 1000


def ours(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    ops.unscale_(grads, found_inf, inv_scale)


def theirs(groups: Sequence[Sequence[Tensor]], found_inf: Tensor, inv_scale: Tensor) -> None:
    """torch's op as torch.amp.GradScaler calls it: once for every dtype."""
    for grads in groups:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)


def by_dtype(grads: Sequence[Tensor]) -> list[list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        groups.setdefault(grad.dtype, []).append(grad)
    return list(groups.values())


def build(
    shapes: Sequence[testing.Shape], dtypes: Sequence[torch.dtype], device: torch.device
) -> Trial:
    """Both providers work on the same gradients, which are doubled and halved in turn.

    On a GPU a small list comes in copies, used one after the other, that are together larger than
    the L2 cache.
    """
    leaves = testing.parameters(testing.gradients(shapes, dtypes, device))
    grads = [leaf.grad for leaf in leaves]
    size = sum(grad.nbytes for grad in grads)
    lists = [grads] + [[grad.clone() for grad in grads] for _ in range(extra_copies(size, device))]
    factors = [torch.tensor(value, device=device) for value in (2.0, 0.5)]
    turns = itertools.cycle(
        (grads, by_dtype(grads), factor) for factor in factors for grads in lists
    )
    found_inf = {name: torch.zeros((), device=device) for name in (OURS, BASELINE)}

    def launch_ours() -> None:
        grads, _, factor = next(turns)
        ours(grads, found_inf[OURS], factor)

    def launch_theirs() -> None:
        _, groups, factor = next(turns)
        theirs(groups, found_inf[BASELINE], factor)

    def verify_all() -> None:
        for name, flag in found_inf.items():
            check(flag.item() == 0, f"{name} raised found_inf for finite gradients")
        verify(grads)

    providers = (Provider(OURS, launch_ours), Provider(BASELINE, launch_theirs))
    return Trial(providers, verify_all, bytes=2 * size, alive=leaves)


def extra_copies(size: int, device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return min(MAX_COPIES, L2_MULTIPLE * l2_bytes // size)


def verify(grads: Sequence[Tensor]) -> None:
    """Values and found_inf are torch's, for finite gradients and for one infinity at the end."""
    inv_scale = torch.tensor(1 / 3000, device=grads[0].device)
    for last in (None, torch.inf):
        mine, expected = ([grad.clone() for grad in grads] for _ in range(2))
        if last is not None:
            mine[-1].view(-1)[-1] = expected[-1].view(-1)[-1] = last
        found, expected_found = (torch.zeros((), device=grads[0].device) for _ in range(2))
        ours(mine, found, inv_scale)
        theirs(by_dtype(expected), expected_found, inv_scale)
        wrong = sum(not a.equal(b) for a, b in zip(mine, expected, strict=True))
        check(wrong == 0, f"values differ from torch's in {wrong} of {len(grads)} tensors")
        check(found.equal(expected_found), f"found_inf is {found.item()}, not torch's")


def limit(device: torch.device, quick: bool) -> Case:
    """A copy of memory: like unscale_, it reads as many bytes as it writes."""
    size = MI if quick else 64 * MI

    def build_copy() -> Trial:
        source = testing.gradient(size, device=device)
        target = torch.empty_like(source)
        return Trial((Provider("copy", lambda: target.copy_(source)),), bytes=2 * source.nbytes)

    return Case(f"limit: copy {binary(size)} fp32", build_copy)


def binary(size: int) -> str:
    """A multiple of 1024 in words: 65536 is "64 Ki"."""
    return f"{size // MI} Mi" if size % MI == 0 else f"{size // KI} Ki"


def cases(device: torch.device, quick: bool) -> list[Case]:
    fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
    large, largest = (64 * KI, MI) if quick else (4 * MI, 64 * MI)
    gpt2_name, gpt2 = "GPT-2 small, 148 tensors, fp32", testing.gpt2_small_shapes()
    if quick:
        gpt2_name = "GPT-2 small at 1/32 of its width, fp32"
        gpt2 = testing.gpt2_small_shapes(width=24, vocabulary=1571, positions=32)
    # torch's CUDA op takes no bfloat16.
    mixed_name, mixed = "fp32+fp16+bf16", (fp32, fp16, bf16)
    if device.type == "cuda":
        mixed_name, mixed = "fp32+fp16", (fp32, fp16)
    lists = [
        ("4000 x 100 fp32", 4000 * [100], [fp32]),
        (f"16 x {binary(large)} fp32", 16 * [large], [fp32]),
        (f"1 x {binary(largest)} fp32", [largest], [fp32]),
        (gpt2_name, gpt2, [fp32]),
        (f"300 x 10000 {mixed_name}", 300 * [10000], mixed),
        ("2 x 10 fp32 (not counted)", 2 * [10], [fp32]),
    ]
    return [
        Case(name, partial(build, shapes, dtypes, device), counted="not counted" not in name)
        for name, shapes, dtypes in lists
    ]


OP = Op(
    name="unscale",
    notes=(
        "Contiguous .grad tensors of parameters, sizes in elements; inv_scale is 2.0 and 0.5 in "
        "turn; nothing is subtracted. GB/s counts one read and one write of every gradient.",
    ),
    rate="GB/s",
    host=False,
    limit=limit,
    cases=cases,
)
