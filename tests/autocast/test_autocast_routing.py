"""Test the ops that are routed to amp_ext's GEMM, and what stays torch's."""

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import amp_ext
from autocast_cases import BROADCAST, FORMS, LOW, Form, Seen
from cases import assert_equal, multiplies

every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize("low", LOW, ids=["fp16", "bf16"])
@every_form
def test_routed(form: Form, low: torch.dtype) -> None:
    """A form is one product with torch's dtype, shape and strides.

    The result and each gradient are sums in FP32, rounded once to the dtype of their tensor. All
    sums are exact in FP32. Operands and addends are whole numbers once they are rounded to 16 bits.
    """
    count = len(form.operands)
    region = amp_ext.autocast("cpu", low)
    for i, dtypes in enumerate(([FP32], [low], [low, FP32], [FP32, low], [FP16, BF16])):
        values = form.integers(63)
        kinds = [dtypes[j % len(dtypes)] if j < count else dtypes[-1] for j in range(len(values))]
        operands = [value * (1 + 2.0**-14) for value in values[:count]]
        addends = [16 * value + 2.0**-7 for value in values[count:]]
        tensors = [t.to(kind) for t, kind in zip(operands + addends, kinds, strict=True)]
        exact = [t.to(low).double() for t in tensors]
        for leaf in (*tensors, *exact):
            leaf.requires_grad_()

        with region, Seen() as seen:
            result = form(*tensors)
        with torch.autocast("cpu", low):
            torchs = form(*tensors)
        with region, torch.no_grad():
            assert form(*tensors).equal(result)
        with torch.no_grad():
            for tensor in tensors if dtypes == [FP32] else ():
                tensor.mul_(2)  # the call has saved 16-bit copies
        cotangent = torch.randint_like(result, -100, 101)
        with region if i % 2 else contextlib.nullcontext():
            result.backward(cotangent)

        assert (seen.gemms, seen.torchs) == (1, 0), seen.ops
        assert (result.dtype, result.shape) == (low, torchs.shape)
        used = [d for d, size in enumerate(result.shape) if size > 1]
        assert [result.stride(d) for d in used] == [torchs.stride(d) for d in used]
        assert torchs._is_view() or not result._is_view()
        expected = form(*exact)
        assert_equal(result, expected)
        gradients = torch.autograd.grad(expected, exact, cotangent.double())
        for tensor, gradient in zip(tensors, gradients, strict=True):
            assert tensor.grad.dtype == tensor.dtype
            if tensor.dtype == FP32 or form is not FORMS[BROADCAST]:  # autograd adds up the batch
                assert_equal(tensor.grad, gradient)


@every_form
def test_second_order(form: Form) -> None:
    """Second derivatives of routed products of small whole numbers are exact.

    The weights of the gradients, whole numbers times 1 + 2**-14, are FP32 alone. The gradient of
    the 16-bit cotangent has a part from each of the gradients, rounded by 2**-11 of it.
    """
    values = form.integers(1)
    weights = [torch.randint_like(value, -1, 2) * (1 + 2.0**-14) for value in values]
    values.append(torch.randint_like(form(*values), -1, 2))
    found = []
    for dtype, region in (
        (FP32, amp_ext.autocast("cpu", FP16)),
        (FP64, contextlib.nullcontext()),
    ):
        leaves = [value.to(dtype, copy=True).requires_grad_() for value in values]
        with region:
            result = form(*leaves[:-1])
        grads = torch.autograd.grad(result, leaves[:-1], leaves[-1].to(result), create_graph=True)
        penalty = sum((weight * grad).sum() for weight, grad in zip(weights, grads, strict=True))
        unused = {"allow_unused": True, "materialize_grads": True}
        found.append(torch.autograd.grad(penalty, leaves, **unused))
    *of_tensors, (of_cotangent, exact) = zip(*found, strict=True)
    for gradient, expected in of_tensors:
        assert gradient.dtype == FP32
        assert_equal(gradient, expected)
    error = (of_cotangent - exact).abs().flatten()
    assert (error <= 2.0**-8 * exact.abs().amax() if exact.numel() else error).all()


FORMATS = torch.contiguous_format, torch.channels_last
REGIONS = (torch.autocast, amp_ext.autocast)


def assert_as_torch(call: Callable[[], Any], low: torch.dtype = FP16) -> tuple[Any, int]:
    """Assert that a call has torch's result or error; return it, and the number of gemms."""
    found = []
    for region in REGIONS:
        torch.manual_seed(0)
        try:
            with region("cpu", low), Seen() as seen:
                result = call()
        except Exception as error:  # torch defines the expected error
            found.append((type(error), str(error)))
            continue
        kind = type(result), result.dtype, result.layout, result.device
        has_values = kind[::2] == (Tensor, torch.strided) and not (
            result.is_nested or result.is_meta
        )
        found.append((*kind, has_values and (result.stride(), str(result.tolist()))))
    assert found[0] == found[1]
    return found[0], seen.gemms


# ---- what is not routed ------------------------------------------------------------------------

# `t(*shape)` makes a tensor of the dtype under test.
NOT_ROUTED: dict[str, Callable[[Callable[..., Tensor]], Tensor]] = {
    "addbmm": lambda t: torch.addbmm(t(3, 5), t(2, 3, 4), t(2, 4, 5)),
    "1-D @ 1-D": lambda t: t(4) @ t(4),
    "out=": lambda t: torch.mm(t(3, 4), t(4, 5), out=t(3, 5)),
    "addmm_": lambda t: t(3, 5).addmm_(t(3, 4), t(4, 5)),
    "conv2d 1x3": lambda t: F.conv2d(t(2, 4, 6, 6), t(5, 4, 1, 3)),
    "conv2d 3x1": lambda t: F.conv2d(t(2, 4, 6, 6), t(5, 4, 3, 1)),
    "conv2d, stride 1 and 2": lambda t: F.conv2d(t(2, 4, 6, 6), t(5, 4, 1, 1), stride=(1, 2)),
    "conv2d, stride 2, valid": lambda t: F.conv2d(
        t(2, 4, 6, 6), t(5, 4, 1, 1), stride=2, padding="valid"
    ),
    "conv2d, padding 0 and 1": lambda t: F.conv2d(t(2, 4, 6, 6), t(5, 4, 1, 1), padding=(0, 1)),
    "conv2d, 2 groups": lambda t: F.conv2d(t(2, 4, 6, 6), t(6, 2, 1, 1), groups=2),
    # Shapes that do not fit raise torch's error.
    "misfit, linear": lambda t: F.linear(t(3, 4), t(5, 3)),
    "misfit, linear, bias": lambda t: F.linear(t(3, 4), t(5, 4), t(4)),
    "misfit, linear, 3-D weight": lambda t: F.linear(t(3, 4), t(2, 4, 4)),
    "misfit, mm": lambda t: t(3, 4).mm(t(3, 5)),
    "misfit, mm, 3-D": lambda t: t(2, 3, 4).mm(t(4, 5)),
    "misfit, addmm": lambda t: torch.addmm(t(4), t(3, 4), t(4, 5)),
    "misfit, matmul": lambda t: t(2, 3, 4) @ t(3, 5),
    "misfit, matmul, batches": lambda t: t(2, 3, 4) @ t(3, 4, 5),
    "misfit, matmul, 0-dim": lambda t: t(2, 3, 4) @ t(),
    "misfit, bmm": lambda t: t(2, 3, 4).bmm(t(3, 4, 5)),
    "misfit, baddbmm": lambda t: torch.baddbmm(t(4), t(2, 3, 4), t(2, 4, 5)),
    "misfit, conv2d": lambda t: F.conv2d(t(2, 3, 4, 4), t(5, 4, 1, 1)),
    "misfit, conv2d, bias": lambda t: F.conv2d(t(2, 4, 3, 3), t(5, 4, 1, 1), t(4)),
    "misfit, conv2d, 2-D image": lambda t: F.conv2d(t(4, 4), t(5, 4, 1, 1)),
    "misfit, conv2d, padding": lambda t: F.conv2d(t(2, 4, 3, 3), t(5, 4, 1, 1), padding="some"),
    "misfit, conv2d, 3 strides": lambda t: F.conv2d(t(1, 2, 3, 3), t(4, 2, 1, 1), None, (1, 1, 1)),
    "misfit, conv2d, 3 paddings": lambda t: F.conv2d(t(1, 2, 3, 3), t(4, 2, 1, 1), padding=3 * [0]),
    "misfit, conv2d, 3 dilations": lambda t: F.conv2d(t(2, 3, 3), t(4, 2, 1, 1), dilation=3 * [1]),
}


@pytest.mark.parametrize("name", NOT_ROUTED)
def test_not_routed(name: str) -> None:
    """Other ops have torch's results, bit for bit, and torch's errors."""
    for low, dtype in ((FP16, FP32), (FP16, FP16), (BF16, BF16)):
        tensor = functools.partial(random, dtype)
        outcome, gemms = assert_as_torch(functools.partial(NOT_ROUTED[name], tensor), low)
        assert gemms == 0
        assert len(outcome) == 2 or not name.startswith("misfit")


def random(dtype: torch.dtype, *shape: int) -> Tensor:
    return (4 * torch.randn(shape)).to(dtype)


WITH_THREE = "linear, bias", "addmm", "baddbmm", "conv2d, bias"
OTHER_DTYPES = (torch.float64, torch.complex64, torch.int64, torch.bool, torch.float8_e4m3fn)


@pytest.mark.parametrize("other", OTHER_DTYPES, ids=str)
@pytest.mark.parametrize("name", ["mm", "bmm", "matmul 3-D 2-D", *WITH_THREE])
def test_one_tensor_of_another_dtype_is_torchs(name: str, other: torch.dtype) -> None:
    """A product with one tensor that gemm does not take is torch's, or torch's error."""
    for odd in range(3 if name in WITH_THREE else 2):
        tensors = FORMS[name].integers(4)
        tensors[odd] = tensors[odd].to(other)
        _, gemms = assert_as_torch(functools.partial(FORMS[name], *tensors))
        assert gemms == 0


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse": lambda t: t.to_sparse(),
    "CSR": lambda t: t.to_sparse_csr(),
    "mkldnn": lambda t: t.to_mkldnn(),
    "nested": lambda t: torch.nested.nested_tensor([t, t], layout=torch.strided),
    "jagged": lambda t: torch.nested.nested_tensor([t, t[:1]], layout=torch.jagged),
    "two tensors": lambda t: TwoTensor(t, 2 * t),
    "meta": lambda t: t.to("meta"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of features that torch calls new
@pytest.mark.parametrize("op", [F.linear, torch.matmul])
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_other_kinds_of_tensors_are_torchs(make: Callable[[Tensor], Tensor], op: Any) -> None:
    """Products of other kinds of tensors are torch's, or torch's errors."""
    plain = torch.ones(4, 4)
    for tensors in ((make(plain), plain), (plain, make(plain))):
        assert_as_torch(functools.partial(op, *tensors))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by torch itself
@pytest.mark.parametrize("name", ["vmap", "grad", "jvp"])
def test_function_transforms_are_torchs(name: str) -> None:
    """Within torch.func's transforms products are torch's, bit for bit."""
    x, weight = torch.randn(5, 4), torch.randn(3, 4)

    def loss(w: Tensor) -> Tensor:
        return F.linear(x, w).float().square().sum()

    calls: dict[str, Callable[[], Tensor]] = {
        "vmap": lambda: torch.func.vmap(loss)(torch.stack([weight, -weight])),
        "grad": lambda: torch.func.grad(loss)(weight),
        "jvp": lambda: torch.func.jvp(loss, (weight,), (weight,))[1],
    }
    outcome, _ = assert_as_torch(calls[name])
    assert outcome[0] is Tensor


# ---- how products are as torch's ---------------------------------------------------------------


def relu_after_a_checkpoint(run: Callable[[], Tensor], x: Tensor) -> Tensor:
    return checkpoint(lambda _: run(), x, use_reentrant=True).relu_()


def detach_in_place(run: Callable[[], Tensor], x: Tensor) -> Tensor:
    return run().detach_() + x.sum()


def add_after_no_grad(run: Callable[[], Tensor], x: Tensor) -> Tensor:
    with torch.no_grad():
        result = run()
    return result.add_(x.sum())


@pytest.mark.parametrize("change", [relu_after_a_checkpoint, detach_in_place, add_after_no_grad])
@pytest.mark.parametrize(
    "name",
    ["conv2d", "conv2d, channels_last", "matmul 1-D 2-D", "matmul 2-D 1-D", "linear 1-D"],
)
def test_results_may_change_in_place(name: str, change: Any) -> None:
    """A change in place has torch's result and gradient."""
    values, *others = FORMS[name].integers(1)
    outcomes = []
    for region in REGIONS:
        x = values.clone().requires_grad_()
        with region("cpu", FP16):
            result = change(functools.partial(FORMS[name], x, *others), x)
        result.float().sum().backward()
        outcomes.append([result, x.grad])
    for theirs, ours in zip(*outcomes, strict=True):
        assert torch.equal(theirs, ours)


def layout(tensor: Tensor) -> list[tuple[int, int]]:
    """Return sizes and strides.

    torch's convolutions by FP16 instructions give dimensions of one element strides of their own.
    """
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return [(size, stride) for size, stride in dims if size != 1 or not multiplies(FP16)]


@pytest.mark.parametrize("unbatched", [False, True], ids=["batched", "unbatched"])
@pytest.mark.parametrize("sizes", [(2, 3, 4, 5), (1, 3, 4, 5), (2, 3, 4, 1)], ids=str)
@pytest.mark.parametrize("filters", [6, 1])
def test_strides_of_convolutions(filters: int, sizes: tuple[int, ...], unbatched: bool) -> None:
    """The result and all gradients have exactly torch's strides."""
    for x_format, w_format, has_bias in itertools.product(FORMATS, FORMATS, [True, False]):
        strides = []
        for region in REGIONS:
            x = torch.randn(sizes).contiguous(memory_format=x_format)
            x = (x[0] if unbatched else x).detach().requires_grad_()
            weight = torch.randn(filters, 3, 1, 1).to(memory_format=w_format).requires_grad_()
            bias = torch.randn(filters, requires_grad=True) if has_bias else None
            with region("cpu", FP16):
                result = F.conv2d(x, weight, bias)
            result.float().square().sum().backward()
            leaves = [leaf.grad for leaf in (x, weight, bias) if leaf is not None]
            strides.append([layout(tensor) for tensor in (result, *leaves)])
        assert strides[0] == strides[1], (x_format, w_format, has_bias)


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("name", [*WITH_THREE, "conv2d, unbatched", "conv2d, channels_last, bias"])
def test_order_of_hooks(name: str, uses: int) -> None:
    """Hooks of an op's arguments fire in torch's order."""
    orders: list[list[int]] = []
    for region in REGIONS:
        leaves = [leaf.requires_grad_() for leaf in FORMS[name].integers(1)]
        orders.append([])
        for i, leaf in enumerate(leaves):
            leaf.register_post_accumulate_grad_hook(lambda _, i=i: orders[-1].append(i))
        with region("cpu", FP16):
            loss = sum(FORMS[name](*leaves).float().sum() for _ in range(uses))
        loss.backward()
    assert orders[0] == orders[1]
