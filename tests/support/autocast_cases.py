"""Calls that autocast routes to amp_ext's GEMM, and a recorder of calls."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

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


class Form(NamedTuple):
    """A way to write a product that is linear in each of its tensors.

    Attributes:
        run: takes operands, then addends, then scalars by name.
        operands: shapes of the tensors rounded to autocast's dtype.
        addends: shapes of biases and of addmm's first argument.
        scalars: alpha and beta.
    """

    run: Callable[..., Tensor]
    operands: Sequence[tuple[int, ...]]
    addends: Sequence[tuple[int, ...]] = ()
    scalars: Mapping[str, float] = MappingProxyType({})

    def integers(self, limit: int) -> list[Tensor]:
        """Return operands and addends of whole numbers from -limit to limit."""
        shapes = (*self.operands, *self.addends)
        return [torch.randint(-limit, limit + 1, shape).float() for shape in shapes]

    def __call__(self, *tensors: Tensor) -> Tensor:
        return self.run(*tensors, **self.scalars)


def addmm(a: Tensor, b: Tensor, addend: Tensor, **scalars: float) -> Tensor:
    return torch.addmm(addend, a, b, **scalars)


def baddbmm(a: Tensor, b: Tensor, addend: Tensor, **scalars: float) -> Tensor:
    return torch.baddbmm(addend, a, b, **scalars)


def conv2d_channels_last(image: Tensor, *others: Tensor) -> Tensor:
    return F.conv2d(image.contiguous(memory_format=torch.channels_last), *others)


HALF = MappingProxyType({"alpha": -0.5, "beta": 2.0})
IMAGE, KERNEL = (2, 33, 4, 6), (5, 33, 1, 1)
BROADCAST = "matmul, batches broadcast"

FORMS: dict[str, Form] = {
    "linear": Form(F.linear, [(3, 33), (5, 33)]),
    "linear, bias": Form(F.linear, [(3, 33), (5, 33)], [(5,)]),
    "linear 1-D": Form(F.linear, [(33,), (5, 33)]),
    "linear 1-D, bias": Form(F.linear, [(33,), (5, 33)], [(5,)]),
    "linear 4-D, bias": Form(F.linear, [(2, 1, 3, 33), (5, 33)], [(5,)]),
    "linear, k = 0": Form(F.linear, [(3, 0), (5, 0)], [(5,)]),
    "mm": Form(torch.mm, [(3, 33), (33, 5)]),
    "mm, strided": Form(lambda a, b: a[:, ::2].mm(b[::2, 1::3]), [(3, 66), (66, 16)]),
    "mm, negative view": Form(lambda a, b: a.mm(torch._neg_view(b)), [(3, 33), (33, 5)]),
    "matmul 2-D 2-D": Form(torch.matmul, [(3, 33), (33, 5)]),
    "matmul 1-D 2-D": Form(torch.matmul, [(33,), (33, 5)]),
    "matmul 2-D 1-D": Form(torch.matmul, [(3, 33), (33,)]),
    "matmul 3-D 1-D": Form(torch.matmul, [(2, 3, 33), (33,)]),
    "matmul 1-D 3-D": Form(torch.matmul, [(33,), (2, 33, 5)]),
    "matmul 3-D 2-D": Form(torch.matmul, [(2, 3, 33), (33, 5)]),
    "matmul 2-D 3-D": Form(torch.matmul, [(3, 33), (2, 33, 5)]),
    "matmul 3-D 3-D": Form(torch.matmul, [(2, 3, 33), (2, 33, 5)]),
    BROADCAST: Form(torch.matmul, [(2, 1, 3, 33), (4, 33, 5)]),
    "matmul, heads": Form(
        lambda q, k: q.transpose(1, 2) @ k.permute(0, 2, 3, 1), [(2, 3, 4, 33), (2, 5, 4, 33)]
    ),
    "bmm": Form(torch.bmm, [(2, 3, 33), (2, 33, 5)]),
    "bmm, no matrices": Form(torch.bmm, [(0, 3, 33), (0, 33, 5)]),
    "addmm": Form(addmm, [(3, 33), (33, 5)], [(3, 5)]),
    "addmm, column": Form(addmm, [(3, 33), (33, 5)], [(3, 1)]),
    "addmm, 0-dim": Form(addmm, [(3, 33), (33, 5)], [()]),
    "addmm, alpha and beta": Form(addmm, [(3, 33), (33, 5)], [(5,)], HALF),
    "baddbmm": Form(baddbmm, [(2, 3, 33), (2, 33, 5)], [(2, 3, 5)]),
    "baddbmm, row": Form(baddbmm, [(2, 3, 33), (2, 33, 5)], [(5,)]),
    "baddbmm, a row each": Form(baddbmm, [(2, 3, 33), (2, 33, 5)], [(2, 1, 5)], HALF),
    "einsum bhid,bhjd->bhij": Form(
        lambda q, k: torch.einsum("bhid,bhjd->bhij", q, k), [(2, 4, 3, 33), (2, 4, 5, 33)]
    ),
    "einsum i,i": Form(lambda a, b: torch.einsum("i,i", a, b), [(33,), (33,)]),
    "conv2d": Form(F.conv2d, [IMAGE, KERNEL]),
    "conv2d, bias": Form(F.conv2d, [IMAGE, KERNEL], [(5,)]),
    "conv2d, unbatched": Form(F.conv2d, [(33, 4, 6), KERNEL], [(5,)]),
    "conv2d, no images": Form(F.conv2d, [(0, 33, 4, 6), KERNEL]),
    "conv2d, one pixel": Form(F.conv2d, [(2, 33, 1, 1), KERNEL], [(5,)]),
    "conv2d, one channel": Form(F.conv2d, [(2, 1, 4, 6), (1, 1, 1, 1)]),
    "conv2d, channels_last": Form(conv2d_channels_last, [IMAGE, KERNEL]),
    "conv2d, channels_last, bias": Form(conv2d_channels_last, [IMAGE, KERNEL], [(5,)]),
    "conv2d, strided": Form(lambda x, w: F.conv2d(x[:, ::2, :, 1:], w), [(2, 66, 4, 7), KERNEL]),
    "conv2d, turned": Form(lambda x, w: F.conv2d(x.mT, w), [IMAGE, KERNEL]),
    "conv2d, same": Form(
        lambda x, w, b: F.conv2d(x, w, b, padding="same"), [IMAGE, KERNEL], [(5,)]
    ),
    "conv2d, valid": Form(lambda x, w: F.conv2d(x, w, padding="valid"), [IMAGE, KERNEL]),
}
"""Name -> a call of k = 33 products an element, unless it says otherwise."""
