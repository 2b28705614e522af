"""Multiply DTensors, as under tensor parallelism: each rank multiplies its own shards."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from amp_ext.ops._when_imported import when_imported

_Labels = list[Any]  # a tensor's dimensions: "m", "k", "n", and negative numbers of leading ones


def _labels(given: dict[str, Any]) -> tuple[dict[str, _Labels], _Labels]:
    """Return the labels of the arguments and of the result."""
    a, b = (list(range(2 - given[name].dim(), 0)) for name in "ab")
    out = [*([] if given.get("sum_batch") else max(a, b, key=len)), "m", "n"]
    a += ["k", "m"] if given.get("trans_a") else ["m", "k"]
    b += ["n", "k"] if given.get("trans_b") else ["k", "n"]
    labels = {"a": a, "b": b, "bias": ["n"]}
    if given.get("c") is not None:  # broadcast
        ends = zip(reversed(given["c"].shape), reversed(out), strict=False)
        labels["c"] = [label if size != 1 else None for size, label in ends][::-1]
    return labels, out


def _register(tensor: ModuleType) -> None:
    DTensor, Partial, Replicate, Shard = (
        getattr(tensor, name) for name in ("DTensor", "Partial", "Replicate", "Shard")
    )

    def place(labels: _Labels, split: Any, *, partial: bool) -> Any:
        if split is not None and split in labels:
            return Shard(labels.index(split))
        return Partial() if partial else Replicate()

    @torch.no_grad()
    def multiply(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        for name, value in tensors.items():
            if not isinstance(value, DTensor):
                raise RuntimeError(
                    f"{func._schema.name}: {name} must be a DTensor, as another argument is, got "
                    f"a {type(value).__name__}: torch.distributed.tensor.distribute_tensor makes it"
                )
        without_data = {
            name: torch.empty(value.shape, dtype=value.dtype, device="meta")
            for name, value in tensors.items()
        }
        whole = func(**given | without_data)  # raises for unfit arguments
        labels, out_labels = _labels(given)

        mesh = given["a"].device_mesh
        placements = {name: [] for name in tensors}
        result: list[Any] = []
        for dim in range(mesh.ndim):
            # The dimensions of the product that this dimension of the mesh splits.
            splits = [
                labels[name][placement.dim]
                for name in "ab"
                if isinstance(placement := given[name].placements[dim], Shard)
            ]
            split = splits[0] if splits else None
            for name, places in placements.items():
                places.append(place(labels[name], split, partial=False))
            result.append(place(out_labels, split, partial=split is not None))

        coordinate = mesh.get_coordinate()
        if coordinate is None:  # a rank outside of the mesh has no shards
            device = given["a"].to_local().device
            out = torch.empty(0, dtype=whole.dtype, device=device)
        else:
            own = {
                name: value.detach().redistribute(mesh, placements[name]).to_local()
                for name, value in tensors.items()
            }
            placed = zip(coordinate, result, strict=True)
            if any(number > 0 for number, place in placed if place.is_partial()):
                # Only the first rank of a sum adds these.
                own |= dict.fromkeys(tensors.keys() & {"bias", "c"})
            out = func(**given | own)
        return DTensor.from_local(
            out, mesh, result, run_check=False, shape=whole.shape, stride=whole.stride()
        )

    torch.library.register_torch_dispatch("amp_ext::gemm", DTensor, multiply)


when_imported("torch.distributed.tensor", _register)
