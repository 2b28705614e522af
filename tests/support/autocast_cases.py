"""Calls that autocast routes to amp_ext's GEMM, with their expected results and a recorder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import amp_ext

LOW = (torch.float16, torch.bfloat16)
aten = torch.ops.aten
CONTRACTIONS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.dot, aten.convolution}
"""Where torch's own matrix products and convolutions end, as a dispatch mode sees them."""


class Seen(TorchDispatchMode):
    """Record the ops that run within it, in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        """Return the names of amp_ext's ops."""
        return [op.name().removeprefix("amp_ext::") for op in self.ops if op.namespace == "amp_ext"]

    @property
    def gemms(self) -> int:
        """Return the number of calls of amp_ext's GEMM."""
        return self.ops.count(torch.ops.amp_ext.gemm.default)

    @property
    def torchs(self) -> int:
        """Return the number of torch's own contractions."""
        return sum(op.overloadpacket in CONTRACTIONS for op in self.ops)

    @property
    def casts(self) -> int:
        """Return the number of conversions."""
        return self.ops.count(aten._to_copy.default)


def routed() -> bool:
    """Return whether a product is routed, here and now."""
    with Seen() as seen:
        torch.ones(2, 4) @ torch.ones(4, 4)
    return seen.gemms == 1


@dataclass(frozen=True)
class Form:
    """A way to write a product that is linear in each of its tensors.

    Args:
        run: takes operands, then addends, then scalars by name.
        operands: shapes of the tensors rounded to autocast's dtype.
        addends: shapes of biases and of addmm's first argument.
        scalars: alpha and beta.
        layout: applied to the operands.
    """

    run: Callable[..., Tensor]
    operands: Sequence[tuple[int, ...]]
    addends: Sequence[tuple[int, ...]] = ()
    scalars: Mapping[str, float] = field(default_factory=dict)
    layout: Callable[[Tensor], Tensor] = lambda tensor: tensor

    def tensors(self, dtypes: Sequence[torch.dtype], addend: torch.dtype) -> list[Tensor]:
        """Return random operands, of the dtypes in turn, and addends."""
        values = [torch.randn(shape) for shape in (*self.operands, *self.addends)]
        count = len(self.operands)
        kinds = [dtypes[i % len(dtypes)] for i in range(count)] + len(self.addends) * [addend]
        values[:count] = map(self.layout, values[:count])
        return [value.to(kind) for value, kind in zip(values, kinds, strict=True)]

    def rounded(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Return the rounded factors of the product in fp64."""
        count = len(self.operands)
        operands = [tensor.detach().to(dtype).double() for tensor in tensors[:count]]
        # torch's library rounds addends; it serves where the processor multiplies the dtype itself.
        torchs = amp_ext._C.multiplies(dtype)
        addends = [tensor.detach().to(dtype if torchs else tensor.dtype) for tensor in tensors]
        return operands + [addend.double() for addend in addends[count:]]

    def bounds(
        self,
        compute: Callable[..., Any],
        tensors: Sequence[Tensor],
        dtype: torch.dtype,
        *others: Any,
    ) -> list[Any]:
        """Return `compute` of the values in fp64, of their magnitudes, and of ones: the terms."""
        values, others = self.rounded(tensors, dtype), [other.double() for other in others]
        magnitudes = {name: abs(value) for name, value in self.scalars.items()}
        return [
            compute(values, self.scalars, *others),
            compute([value.abs() for value in values], magnitudes, *[o.abs() for o in others]),
            compute([*map(torch.ones_like, values)], {}, *map(torch.ones_like, others)),
        ]


def addmm(a: Tensor, b: Tensor, addend: Tensor, **scalars: float) -> Tensor:
    return torch.addmm(addend, a, b, **scalars)


def baddbmm(a: Tensor, b: Tensor, addend: Tensor, **scalars: float) -> Tensor:
    return torch.baddbmm(addend, a, b, **scalars)


def channels_last(image: Tensor) -> Tensor:
    return image.contiguous(memory_format=torch.channels_last)


HALF: Mapping[str, float] = MappingProxyType({"alpha": -0.5, "beta": 2.0})
IMAGE, KERNEL = (2, 33, 4, 6), (5, 33, 1, 1)

FORMS: dict[str, Form] = {
    "linear": Form(F.linear, [(3, 33), (5, 33)]),
    "linear, bias": Form(F.linear, [(3, 33), (5, 33)], [(5,)]),
    "linear 1-D, bias": Form(F.linear, [(33,), (5, 33)], [(5,)]),
    "linear 4-D, bias": Form(F.linear, [(2, 1, 3, 33), (5, 33)], [(5,)]),
    "linear, weight transposed": Form(lambda x, w: F.linear(x, w.t()), [(3, 33), (33, 5)]),
    "linear, rows from a slice": Form(lambda x, w: F.linear(x[:, 1], w), [(4, 2, 33), (5, 33)]),
    "mm": Form(torch.mm, [(3, 33), (33, 5)]),
    "mm, k = 3000": Form(torch.mm, [(3, 3000), (3000, 5)]),
    "mm, k = 1": Form(torch.mm, [(3, 1), (1, 5)]),
    "mm, 1 x 1": Form(torch.mm, [(1, 33), (33, 1)]),
    "mm, a transposed": Form(lambda a, b: a.t().mm(b), [(33, 3), (33, 5)]),
    "mm, b transposed": Form(lambda a, b: a.mm(b.t()), [(3, 33), (5, 33)]),
    "mm, both transposed": Form(lambda a, b: a.t().mm(b.t()), [(33, 3), (5, 33)]),
    "mm, strided": Form(lambda a, b: a[:, ::2].mm(b[::2, 1::3]), [(3, 66), (66, 16)]),
    "mm, expanded": Form(lambda a, b: a.expand(3, 33).mm(b.expand(33, 5)), [(1, 33), (33, 1)]),
    "@": Form(lambda a, b: a @ b, [(3, 33), (33, 5)]),
    "matmul 1-D 2-D": Form(torch.matmul, [(33,), (33, 5)]),
    "matmul 2-D 1-D": Form(torch.matmul, [(3, 33), (33,)]),
    "matmul 3-D 1-D": Form(torch.matmul, [(2, 3, 33), (33,)]),
    "matmul 1-D 3-D": Form(torch.matmul, [(33,), (2, 33, 5)]),
    "matmul 3-D 2-D": Form(torch.matmul, [(2, 3, 33), (33, 5)]),
    "matmul 2-D 3-D": Form(torch.matmul, [(3, 33), (2, 33, 5)]),
    "matmul 3-D 3-D": Form(torch.matmul, [(2, 3, 33), (2, 33, 5)]),
    "matmul 4-D 2-D": Form(torch.matmul, [(2, 4, 3, 33), (33, 5)]),
    "matmul, batches broadcast": Form(torch.matmul, [(2, 1, 3, 33), (4, 33, 5)]),
    "matmul, heads": Form(
        lambda q, k: q.transpose(1, 2) @ k.permute(0, 2, 3, 1), [(2, 3, 4, 33), (2, 5, 4, 33)]
    ),
    "bmm": Form(torch.bmm, [(2, 3, 33), (2, 33, 5)]),
    "bmm, transposed": Form(lambda a, b: a.mT.bmm(b.mT), [(2, 33, 3), (2, 5, 33)]),
    "bmm, expanded": Form(lambda a, b: a.expand(2, 3, 33).bmm(b), [(1, 3, 33), (2, 33, 5)]),
    "bmm, strided": Form(lambda a, b: a[::2, :, 1:].bmm(b[1:]), [(4, 3, 34), (3, 33, 5)]),
    "addmm": Form(addmm, [(3, 33), (33, 5)], [(3, 5)]),
    "addmm, row": Form(addmm, [(3, 33), (33, 5)], [(5,)]),
    "addmm, column": Form(addmm, [(3, 33), (33, 5)], [(3, 1)]),
    "addmm, 0-dim": Form(addmm, [(3, 33), (33, 5)], [()]),
    "addmm, alpha and beta": Form(addmm, [(3, 33), (33, 5)], [(5,)], HALF),
    "addmm, alpha = 0": Form(addmm, [(3, 33), (33, 5)], [(3, 5)], {"alpha": 0.0}),
    "addmm, beta = 0": Form(addmm, [(3, 33), (33, 5)], [(3, 5)], {"beta": 0.0}),
    "baddbmm": Form(baddbmm, [(2, 3, 33), (2, 33, 5)], [(2, 3, 5)]),
    "baddbmm, row": Form(baddbmm, [(2, 3, 33), (2, 33, 5)], [(5,)]),
    "baddbmm, shared": Form(baddbmm, [(2, 3, 33), (2, 33, 5)], [(3, 5)]),
    "baddbmm, a row each": Form(baddbmm, [(2, 3, 33), (2, 33, 5)], [(2, 1, 5)], HALF),
    "linear, k = 0": Form(F.linear, [(3, 0), (5, 0)], [(5,)]),
    "addmm, k = 0": Form(addmm, [(3, 0), (0, 5)], [(5,)], HALF),
    "bmm, no matrices": Form(torch.bmm, [(0, 3, 33), (0, 33, 5)]),
    "mm, negative view": Form(lambda a, b: a.mm(torch._neg_view(b)), [(3, 33), (33, 5)]),
    "einsum ij,jk->ik": Form(lambda a, b: torch.einsum("ij,jk->ik", a, b), [(3, 33), (33, 5)]),
    "einsum ij,kj": Form(lambda a, b: torch.einsum("ij,kj", a, b), [(3, 33), (5, 33)]),
    "einsum bhid,bhjd->bhij": Form(
        lambda q, k: torch.einsum("bhid,bhjd->bhij", q, k), [(2, 4, 3, 33), (2, 4, 5, 33)]
    ),
    "einsum ...i,oi->...o": Form(
        lambda x, w: torch.einsum("...i,oi->...o", x, w), [(2, 3, 33), (5, 33)]
    ),
    "einsum i,i": Form(lambda a, b: torch.einsum("i,i", a, b), [(33,), (33,)]),
    "conv2d": Form(F.conv2d, [IMAGE, KERNEL]),
    "conv2d, bias": Form(F.conv2d, [IMAGE, KERNEL], [(5,)]),
    "conv2d, unbatched": Form(F.conv2d, [(33, 4, 6), KERNEL], [(5,)]),
    "conv2d, no images": Form(F.conv2d, [(0, 33, 4, 6), KERNEL]),
    "conv2d, one pixel": Form(F.conv2d, [(2, 33, 1, 1), KERNEL], [(5,)]),
    "conv2d, one channel": Form(F.conv2d, [(2, 1, 4, 6), (1, 1, 1, 1)]),
    "conv2d, channels_last": Form(F.conv2d, [IMAGE, KERNEL], layout=channels_last),
    "conv2d, channels_last, bias": Form(F.conv2d, [IMAGE, KERNEL], [(5,)], layout=channels_last),
    "conv2d, strided": Form(lambda x, w: F.conv2d(x[:, ::2, :, 1:], w), [(2, 66, 4, 7), KERNEL]),
    "conv2d, turned": Form(lambda x, w: F.conv2d(x.mT, w), [IMAGE, KERNEL]),
    "conv2d, same": Form(
        lambda x, w, b: F.conv2d(x, w, b, padding="same"), [IMAGE, KERNEL], [(5,)]
    ),
    "conv2d, valid": Form(lambda x, w: F.conv2d(x, w, padding="valid"), [IMAGE, KERNEL]),
}
"""Name -> a call of k = 33 products an element, unless it says otherwise."""

EXPANDED = ("mm, expanded", "bmm, expanded", "matmul, batches broadcast")
"""Autograd sums gradients of expanded tensors, in the tensors' own dtype."""


def assert_within(
    actual: Tensor, expected: Tensor, magnitude: Tensor, terms: Tensor, partial_sums: bool = False
) -> None:
    """Assert the accuracy of sums that were accumulated in fp32 and rounded once to their dtype.

    A sum of t terms carries at most t - 1 additions, a rounding of each product, alpha and beta: (t
    + 3) * 2**-24 of the sum of the terms' magnitudes. Products of fp16 or bf16 numbers are exact.
    The rounding to 16 bits adds half a unit in the last place.

    Args:
        actual: the computed sums.
        expected: the same sums in fp64.
        magnitude: sums of the terms' magnitudes.
        terms: how many terms each sum has.
        partial_sums: each is a sum of partial sums, rounded to 16 bits as well.
    """
    error = (terms + 3) * 2.0**-24 * magnitude
    if actual.dtype in LOW:
        info = torch.finfo(actual.dtype)
        if partial_sums:
            error = error + info.eps / 2 * (magnitude + error)
        half_ulp = info.eps / 2 * (expected.abs() + error)
        error = error + half_ulp.clamp(min=info.tiny * info.eps / 2)
    excess = (actual.double() - expected).abs() / error
    excess = torch.where(actual.double() == expected, 0.0, excess)
    assert (excess <= 1).all(), f"the error is {excess.max().item():.2f} times its bound"
