"""Report the gradients that made a step overflow."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

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
        examined: the number of gradients of the optimizers with an overflow.
    """

    overflow: bool = False
    gradients: tuple[BadGradient, ...] = ()
    examined: int = 0

    def __bool__(self) -> bool:
        return bool(self.gradients)

    def __str__(self) -> str:
        if not self.overflow:
            return "No overflow."
        if self.gradients:
            head = f"{len(self.gradients)} of {self.examined} gradients are not finite:"
            return "\n  ".join([head, *map(str, self.gradients)])
        return (
            f"There was an overflow, but of {self.examined} gradients none is infinite or NaN now. "
            "Gradients have been cleared or overwritten since, or they overflowed when they were "
            "unscaled or added up to a norm, or in another process. Call overflow_report() before "
            "zero_grad()."
        )


@torch.no_grad()
def report_on(
    optimizers: Iterable[Optimizer], named_parameters: NamedParameters | None
) -> OverflowReport:
    """Find infinities and NaNs in the gradients of optimizers that overflowed."""
    if isinstance(named_parameters, torch.nn.Module):
        named_parameters = named_parameters.named_parameters()
    names = {id(param): name for name, param in named_parameters or ()}
    params = {id(param): (name, param) for name, param in _with_names(optimizers)}
    grads = [
        (names.get(key, name), param.grad)
        for key, (name, param) in params.items()
        if param.grad is not None
    ]
    bad = [_counted(name, grad) for name, grad in grads if not _elements(grad).isfinite().all()]
    return OverflowReport(True, tuple(bad), len(grads))


def _with_names(optimizers: Iterable[Optimizer]) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters with their names or places in their optimizers."""
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            names = group.get("param_names") or ()
            has_names = len(names) == len(group["params"])
            for index, param in enumerate(group["params"]):
                place = f"param_groups[{number}]['params'][{index}]"
                yield (names[index] if has_names else place), param


def _elements(grad: Tensor) -> Tensor:
    """Return the elements that the scaler checks."""
    if hasattr(grad, "to_local"):
        grad = grad.to_local()
    return grad._values() if grad.layout is torch.sparse_coo else grad


def _counted(name: str, grad: Tensor) -> BadGradient:
    elements = _elements(grad)
    kinds = elements.isposinf(), elements.isneginf(), elements.isnan()
    counts = [int(kind.sum()) for kind in kinds]
    return BadGradient(name, tuple(grad.shape), grad.dtype, grad.device, *counts, elements.numel())
