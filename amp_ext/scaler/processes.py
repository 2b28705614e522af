"""Overflows and norms of gradients of which several processes have parts."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

Spread = tuple[Any, tuple[Any, ...]] | str | None
"""How parameters are spread over processes: the mesh and the placements of DTensors, ``"fsdp"`` for
those that FSDP1 has flattened, ``"replicated"`` where all processes have the same gradient or none,
None where nothing tells."""

Groups = tuple[Any, ...]
"""Process groups; reducing over one after the other reduces over all of their processes."""

Reduce = Callable[[dict[torch.device, Tensor], list[Spread], list[list[Tensor]]], Tensor | None]


def reduction(scale: Tensor, process_group: Any) -> Reduce | None:
    """:func:`reduce` for a scaler; None where there is but one process."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    return functools.partial(reduce, scale, process_group)


def reduce(
    scale: Tensor,
    process_group: Any,
    found_infs: dict[torch.device, Tensor],
    spreads: Sequence[Spread],
    norms: Sequence[Sequence[Tensor]] = (),
) -> Tensor | None:
    """Make what this process has found in its gradients what all have found, by one reduction for
    each set of processes. The host waits for a GPU only where this process has no gradients.

    Args:
        scale: of the device on which it is done.
        process_group: the scaler's.
        found_infs: by device, float32 tensors of shape (), 0.0 or 1.0; written. One is added if
            there is none, as this process has no gradients, but another process has some.
        spreads: all those of the optimizer's parameters, with or without gradients, in an order
            that is the same everywhere.
        norms: for each spread, those of this process's gradients.

    Returns:
        The norm of the gradients of all processes, a float32 tensor of shape () on the scale's
        device; None where there is nothing to reduce.
    """
    shared: dict[Any, tuple[Groups, list[int]]] = {}  # by processes: the spreads over them
    if process_group is not None and not all(spread == "replicated" for spread in spreads):
        _add(shared, (process_group,))
    for index, spread in enumerate(spreads):
        if groups := _groups_of(spread, process_group):
            _add(shared, groups).append(index)
    if not shared:
        return None

    zero = torch.zeros((), dtype=torch.float64, device=scale.device)
    found = functools.reduce(torch.maximum, _on(scale, found_infs.values()), zero)
    squares = [sum(_on(scale, of_spread), zero) for of_spread in map(_squares, norms)]
    squares = squares or [zero] * len(spreads)
    have_gradients = zero + len(found_infs)
    packed = [
        torch.stack([found, have_gradients, *(squares[index] for index in indices)])
        for _, indices in shared.values()
    ]
    _sum_over(packed, [groups for groups, _ in shared.values()])

    for numbers, (_, indices) in zip(packed, shared.values(), strict=True):
        for number, index in zip(numbers[2:], indices, strict=True):
            squares[index] = number / _replicas(spreads[index])
    norm = sum(squares, zero).sqrt().float()
    sums = torch.stack([numbers[:2] for numbers in packed]).sum(0)
    overflow = ((sums[0] > 0) | ~norm.isfinite()).float()
    for flag in found_infs.values():
        flag.copy_(overflow)
    if not found_infs and sums[1] > 0:
        found_infs[scale.device] = overflow
    return norm


def _add(shared: dict[Any, tuple[Groups, list[int]]], groups: Groups) -> list[int]:
    processes = tuple(frozenset(distributed.get_process_group_ranks(group)) for group in groups)
    return shared.setdefault(processes, (groups, []))[1]


def _groups_of(spread: Spread, process_group: Any) -> Groups:
    """Those over which a spread's gradients are reduced."""
    if spread == "fsdp":
        return (distributed.group.WORLD if process_group is None else process_group,)
    if not isinstance(spread, tuple) or spread[0].get_coordinate() is None:
        return ()
    mesh, _ = spread
    if mesh.size() == distributed.get_world_size():
        return (distributed.group.WORLD,)
    return tuple(mesh.get_all_groups())


def _replicas(spread: Spread) -> int:
    """How many processes have the same part of a spread's gradients."""
    if not isinstance(spread, tuple):
        return 1
    mesh, placements = spread
    replicas = 1
    for dim, placement in enumerate(placements):
        if placement.is_replicate():
            replicas *= mesh.size(dim)
    return replicas


def _squares(norms: Iterable[Tensor]) -> Iterable[Tensor]:
    return (norm.double().square() for norm in norms)


def _on(scale: Tensor, tensors: Iterable[Tensor]) -> Iterable[Tensor]:
    # A copy to the CPU must have arrived before it is read.
    lazy = scale.device.type != "cpu"
    return (tensor.to(scale.device, torch.float64, non_blocking=lazy) for tensor in tensors)


def _sum_over(tensors: Sequence[Tensor], groups: Sequence[Groups]) -> None:
    """Sum each tensor over its groups, one group after the other, all tensors at once."""
    for turn in range(max(map(len, groups))):
        works = [
            distributed.all_reduce(tensor, group=its[turn], async_op=True)
            for tensor, its in zip(tensors, groups, strict=True)
            if turn < len(its)
        ]
        for work in works:
            work.wait()
