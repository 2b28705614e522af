"""Reduce overflows and norms of gradients that are distributed over processes."""

import functools
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, distributed

from amp_ext.scaler.optimizers import params_of

Sharding = tuple[Any, tuple[Any, ...]] | str | None
"""The mesh and the placements of DTensors, ``"fsdp"`` for parameters that FSDP1 has flattened, else
None."""


class Reduction:
    """Reduce the flags and norms of one pass over processes.

    The processes have parts of the gradients. There is one all_reduce for each set of processes, or
    for each dimension of a mesh that leaves out processes. The scaler's group comes last, with what
    the other sets have found. The host waits for a GPU only where this process has no gradients.

    Args:
        scale: the scale, on the device of the reduction.
        process_group: the scaler's group.
        optimizer: the optimizer of the gradients.
    """

    def __init__(self, scale: Tensor, process_group: Any, optimizer: Any) -> None:
        self._scale, self._process_group, self._optimizer = scale, process_group, optimizer
        self._shardings: Sequence[Sharding] = ()

    def __call__(
        self,
        found_infs: dict[torch.device, Tensor],
        shardings: Sequence[Sharding],
        norms: Sequence[Sequence[Tensor]] | None,
    ) -> Tensor | None:
        """Reduce, and write the flags.

        Args:
            found_infs: flags by device, float32 tensors of shape (), 0.0 or 1.0. A process without
                gradients has none, and receives one if another process has gradients.
            shardings: all shardings of the optimizer's parameters, with and without gradients, in
                the same order in every process.
            norms: for each sharding, the norms of this process's gradients; None without norms.

        Returns:
            The norm of the gradients of all processes, a float32 tensor of shape () on the scale's
            device; None without norms, or where nothing is reduced.
        """
        if norms is not None and "fsdp" in shardings:
            (group,) = self._groups_of("fsdp")
            if distributed.get_world_size(group) > 1:
                check_split(self._optimizer, is_expected=True)
        self._shardings = shardings
        sets = self._sets()
        if not sets:
            return None
        zero = torch.zeros((), dtype=torch.float64, device=self._scale.device)
        found = functools.reduce(torch.maximum, self._moved(found_infs.values()), zero)
        squares = [sum((norm.square() for norm in self._moved(here)), zero) for here in norms or ()]
        count = zero + len(found_infs)
        for groups, indices in sets:
            indices = indices if squares else []
            numbers = torch.stack([found, count, *(squares[i] for i in indices)])
            for group in groups:
                distributed.all_reduce(numbers, group=group)
            found, count, *sums = numbers
            for i, total in zip(indices, sums, strict=True):
                squares[i] = total / _replicas(shardings[i])
        overflow = found > 0
        norm = None
        if norms is not None:
            norm = sum(squares, zero).sqrt().float()
            overflow = overflow | ~norm.isfinite()
        for flag in found_infs.values():
            flag.copy_(overflow)
        if not found_infs and count > 0:
            found_infs[self._scale.device] = overflow.float()
        return norm

    def spread(self, flag: Tensor) -> None:
        """Set the flag if any process of the last call has set it, by its all_reduces again."""
        self({flag.device: flag}, self._shardings, None)

    def _sets(self) -> list[tuple[tuple[Any, ...], list[int]]]:
        """Return the sets of processes, each with the indices of its shardings."""
        sets: dict[Any, tuple[tuple[Any, ...], list[int]]] = {}

        def add(groups: tuple[Any, ...], *indices: int) -> None:
            # Meshes may have other groups of the same processes.
            processes = tuple(frozenset(distributed.get_process_group_ranks(g)) for g in groups)
            groups, others = sets.pop(processes, (groups, []))
            sets[processes] = groups, [*others, *indices]

        for index, sharding in enumerate(self._shardings):
            if groups := self._groups_of(sharding):
                add(groups, index)
        group = self._process_group
        if group is not None and distributed.get_rank(group) >= 0:
            add((group,))
        return list(sets.values())

    def _groups_of(self, sharding: Sharding) -> tuple[Any, ...]:
        """Return the groups to reduce a sharding's gradients over, one after the other."""
        if sharding == "fsdp":
            group = self._process_group
            return (distributed.group.WORLD if group is None else group,)
        if sharding is None or sharding[0].get_coordinate() is None:
            return ()
        mesh, _ = sharding
        if mesh.ndim > 1 and mesh.size() == distributed.get_world_size():
            return (distributed.group.WORLD,)
        return tuple(mesh.get_all_groups())

    def _moved(self, tensors: Iterable[Tensor]) -> Iterable[Tensor]:
        # A copy to the CPU must have arrived before it is read.
        device = self._scale.device
        return (tensor.to(device, torch.float64, device.type != "cpu") for tensor in tensors)


def is_distributed() -> bool:
    """Return whether there may be other processes."""
    return distributed.is_available() and distributed.is_initialized()


def is_split(param: Tensor) -> bool:
    """Return whether FSDP1 has split a parameter that it has flattened, as without NO_SHARD."""
    # Flat parameters have a padded size if they are split; original ones are vectors then.
    is_flat_parameter = hasattr(param, "_unpadded_unsharded_size")
    return hasattr(param, "_padded_unsharded_size") if is_flat_parameter else param.dim() == 1


def _replicas(sharding: Sharding) -> int:
    """Return how many processes have the same part of a sharding's gradients."""
    if not isinstance(sharding, tuple):
        return 1
    mesh, placements = sharding
    return prod(mesh.size(dim) for dim, place in enumerate(placements) if place.is_replicate())


def check_split(optimizer: Any, is_expected: bool) -> None:
    """Raise if FSDP1's parameters are not split as expected: their norm would be wrong.

    amp_ext reduces norms over processes, so it expects split parameters. torch's code reduces
    nothing, so it expects whole ones.
    """
    if is_distributed() and any(
        hasattr(param, "_fsdp_flattened") and is_split(param) is not is_expected
        for param in params_of(optimizer)
    ):
        raise RuntimeError(
            "GradScaler.clip_grad_norm_: parameters of FullyShardedDataParallel: expected split "
            "ones, norm_type=2 and an enabled scaler, got another case, such as NO_SHARD. Call "
            "unscale_(optimizer), and clip_grad_norm_ of the FullyShardedDataParallel module."
        )


def clip_as_torch(
    optimizer: Any, max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> Tensor:
    """Clip gradients by torch's code."""
    params = list(params_of(optimizer))
    norm = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)
    # The number in a DTensor may be of this process alone.
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
