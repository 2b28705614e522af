"""Overflows and norms of gradients of which several processes have parts."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from amp_ext.scaler.parameters import params_of

Spread = tuple[Any, tuple[Any, ...]] | str | None
"""How parameters are spread over processes: the mesh and the placements of DTensors, ``"fsdp"`` for
those that FSDP1 has flattened, None where nothing tells."""

Groups = tuple[Any, ...]
"""Process groups; reducing over one after the other reduces over all of their processes."""


class Reduction:
    """Makes what this process finds in an optimizer's gradients what all processes find, by one
    reduction for each set of processes. The host waits for a GPU only where this process has no
    gradients.

    Args:
        scale: of the device on which it is done.
        process_group: the scaler's: reduced over in any case.
        optimizer: whose gradients they are.

    Attributes:
        norm_is_common: whether the last norm is the same in all of these processes; False also
            where nothing was reduced.
    """

    def __init__(self, scale: Tensor, process_group: Any, optimizer: Any) -> None:
        self._scale, self._process_group, self._optimizer = scale, process_group, optimizer
        self._spreads: Sequence[Spread] = ()
        self.norm_is_common = False

    def __call__(
        self,
        found_infs: dict[torch.device, Tensor],
        spreads: Sequence[Spread],
        norms: Sequence[Sequence[Tensor]] | None,
    ) -> Tensor | None:
        """
        Args:
            found_infs: by device, float32 tensors of shape (), 0.0 or 1.0; written. One is added if
                there is none, as this process has no gradients, but another process has some.
            spreads: all those of the optimizer's parameters, with or without gradients, in an order
                that is the same everywhere.
            norms: for each spread, those of this process's gradients, if they are wanted.

        Returns:
            The norm of the gradients of all processes, a float32 tensor of shape () on the scale's
            device; None if norms are not wanted or there is nothing to reduce.
        """
        if norms is not None and "fsdp" in spreads:
            self._check_split()
        self._spreads = spreads
        sets = self._sets()
        if not sets:
            return None
        zero = torch.zeros((), dtype=torch.float64, device=self._scale.device)
        found = functools.reduce(torch.maximum, self._here(found_infs.values()), zero)
        squares = [
            sum((norm.square() for norm in self._here(of_spread)), zero)
            for of_spread in norms or ()
        ]
        packed = [
            torch.stack([found, zero + len(found_infs), *(squares[i] for i in indices if squares)])
            for _, indices in sets
        ]
        _sum_over(packed, [groups for groups, _ in sets])

        sums = torch.stack([numbers[:2] for numbers in packed]).sum(0)
        overflow = sums[0] > 0
        norm = None
        if norms is not None:
            for numbers, (_, indices) in zip(packed, sets, strict=True):
                for number, i in zip(numbers[2:], indices, strict=True):
                    squares[i] = number / _replicas(spreads[i])
            norm = sum(squares, zero).sqrt().float()
            overflow = overflow | ~norm.isfinite()
            self.norm_is_common = len(sets) == 1 and len(sets[0][1]) == len(spreads)
        for flag in found_infs.values():
            flag.copy_(overflow)
        if not found_infs and sums[1] > 0:
            found_infs[self._scale.device] = overflow.float()
        return norm

    def share(self, flag: Tensor) -> None:
        """Set a flag, 0.0 or 1.0 on the scale's device, where it is set in another of the processes
        of the last call."""
        self({flag.device: flag}, self._spreads, None)

    def _check_split(self) -> None:
        (group,) = self._groups_of("fsdp")
        if distributed.get_world_size(group) > 1 and any(
            is_flattened(p) and not is_split(p) for p in params_of(self._optimizer)
        ):
            raise RuntimeError(
                "GradScaler.clip_grad_norm_: processes have all of FullyShardedDataParallel's "
                "parameters, as with NO_SHARD, and would count them several times: call "
                "unscale_(optimizer), and clip_grad_norm_ of the FullyShardedDataParallel module"
            )

    def _sets(self) -> list[tuple[Groups, list[int]]]:
        """The sets of processes to be reduced over, each with the indices of its spreads."""
        sets: dict[Any, tuple[Groups, list[int]]] = {}

        def add(groups: Groups) -> list[int]:
            processes = tuple(frozenset(distributed.get_process_group_ranks(g)) for g in groups)
            return sets.setdefault(processes, (groups, []))[1]

        group = self._process_group
        if group is not None and distributed.get_rank(group) >= 0:
            add((group,))
        for index, spread in enumerate(self._spreads):
            if groups := self._groups_of(spread):
                add(groups).append(index)
        return list(sets.values())

    def _groups_of(self, spread: Spread) -> Groups:
        """Those over which a spread's gradients are reduced."""
        if spread == "fsdp":
            group = self._process_group
            return (distributed.group.WORLD if group is None else group,)
        if spread is None or spread[0].get_coordinate() is None:
            return ()
        mesh, _ = spread
        if mesh.ndim > 1 and mesh.size() == distributed.get_world_size():
            return (distributed.group.WORLD,)
        return tuple(mesh.get_all_groups())

    def _here(self, tensors: Iterable[Tensor]) -> Iterable[Tensor]:
        # A copy to the CPU must have arrived before it is read.
        device = self._scale.device
        return (tensor.to(device, torch.float64, device.type != "cpu") for tensor in tensors)


def several() -> bool:
    """Whether this is one of several processes."""
    return distributed.is_available() and distributed.is_initialized()


def is_flattened(param: Tensor) -> bool:
    """Whether it is FSDP1's."""
    return hasattr(param, "_fsdp_flattened")


def is_split(param: Tensor) -> bool:
    """Whether each process has but a part of a parameter of FSDP1's, as by all strategies but
    NO_SHARD. A part is flat."""
    whole = getattr(param, "_unpadded_unsharded_size", None)
    return param.dim() == 1 if whole is None else param.numel() < whole.numel()


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
