"""Report the gradients that made a step overflow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_ext import ops

NamedParameters = torch.nn.Module | Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class BadGradient:
    """Describe a gradient that is not finite. Its str() is a line such as

    ``head.weight: 12 inf, 3 -inf, 1 NaN of 7680 elements, float32 [10, 768] on cuda:0``

    Attributes:
        name: the name of the parameter.
        shape, dtype, device: as the gradient has them.
        positive_infs, negative_infs, nans: the number of such elements.
        numel: the number of elements; the stored elements of a sparse gradient, and this rank's
            elements of a DTensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    positive_infs: int
    negative_infs: int
    nans: int
    numel: int

    def __str__(self) -> str:
        kinds = ((self.positive_infs, "inf"), (self.negative_infs, "-inf"), (self.nans, "NaN"))
        counts = ", ".join(f"{count} {kind}" for count, kind in kinds if count)
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.name}: {counts} of {self.numel} elements, "
            f"{dtype} {list(self.shape)} on {self.device}"
        )


@dataclass(frozen=True)
class OverflowReport:
    """Hold the findings of :meth:`amp_ext.GradScaler.overflow_report`; true with bad gradients.

    Attributes:
        overflow: whether a step overflowed at all.
        gradients: the bad gradients, in the order of the optimizers' parameters.
        parameters: the number of parameters of the optimizers of that step.
        cleared: the number of these parameters that have no gradient now.
        gone: the number of optimizers of that step that no longer exist.
    """

    overflow: bool = False
    gradients: tuple[BadGradient, ...] = ()
    parameters: int = 0
    cleared: int = 0
    gone: int = 0

    def __bool__(self) -> bool:
        return bool(self.gradients)

    def __str__(self) -> str:
        if not self.overflow:
            return "No overflow."
        left = self.parameters - self.cleared
        if self.gradients:
            head = f"{len(self.gradients)} of {left} gradients are not finite:"
            return "\n  ".join([head, *map(str, self.gradients)])
        if self.gone:
            return "There was an overflow, but an optimizer that had it is gone."
        if not left:
            return (
                "There was an overflow, but all gradients have been cleared since: ask for the "
                "report before zero_grad()."
            )
        without = f" Parameters without a gradient: {self.cleared}." if self.cleared else ""
        return (
            f"There was an overflow, but of {left} gradients none is infinite or NaN now: they "
            "have been overwritten since, or it came about when they were unscaled or added up to "
            f"a norm, or in another process.{without}"
        )


@torch.no_grad()
def report_on(
    overflowed: Sequence[Optimizer | None], named_parameters: NamedParameters | None
) -> OverflowReport:
    """Find infinities and NaNs in the gradients of optimizers that overflowed.

    None stands for an optimizer that is gone.
    """
    if not overflowed:
        return OverflowReport()
    gone = overflowed.count(None)
    optimizers = [optimizer for optimizer in overflowed if optimizer is not None]
    if isinstance(named_parameters, torch.nn.Module):
        named_parameters = named_parameters.named_parameters()
    names = {id(param): name for name, param in named_parameters or ()}
    params = {id(param): (name, param) for name, param in _with_names(optimizers)}
    grads = [
        (names.get(key, name), param.grad)
        for key, (name, param) in params.items()
        if param.grad is not None
    ]
    finite = _have_finite_norms([_elements(grad) for _, grad in grads])
    counted = [
        _counted(name, grad)
        for (name, grad), is_finite in zip(grads, finite, strict=True)
        if not is_finite
    ]
    # Finite elements may have a norm beyond the range of float32.
    bad = [found for found in counted if found.positive_infs + found.negative_infs + found.nans]
    cleared = len(params) - len(grads)
    return OverflowReport(True, tuple(bad), len(params), cleared, gone)


def _with_names(optimizers: Iterable[Optimizer]) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters with their names or places in their optimizers."""
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            names = group.get("param_names") or ()
            for index, param in enumerate(group["params"]):
                place = f"param_groups[{number}]['params'][{index}]"
                yield (names[index] if index < len(names) else place), param


def _elements(grad: Tensor) -> Tensor:
    """Return the elements that the scaler checks."""
    if hasattr(grad, "to_local"):
        grad = grad.to_local()
    return grad._values() if grad.layout is torch.sparse_coo else grad


def _have_finite_norms(tensors: Sequence[Tensor]) -> list[bool]:
    """Return whether the L2 norm of each tensor is finite.

    Each device needs one launch and one wait. Tensor subclasses are not examined: False.
    """
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if type(tensor) is Tensor:
            by_device.setdefault(tensor.device, []).append(index)
    result = [False] * len(tensors)
    for device, indices in by_device.items():
        norms = torch.empty(len(indices), dtype=torch.float32, device=device)
        found_inf = torch.zeros((), dtype=torch.float32, device=device)
        ops.grad_norm([tensors[index] for index in indices], found_inf, norms=norms)
        for index, finite in zip(indices, norms.isfinite().tolist(), strict=True):
            result[index] = finite
    return result


def _counted(name: str, grad: Tensor) -> BadGradient:
    elements = _elements(grad)
    kinds = elements.isposinf(), elements.isneginf(), elements.isnan()
    counts = [int(kind.sum()) for kind in kinds]
    return BadGradient(name, tuple(grad.shape), grad.dtype, grad.device, *counts, elements.numel())
