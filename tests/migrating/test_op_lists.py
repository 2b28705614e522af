"""custom_fp16_ops and custom_fp32_ops: in which type listed ops run, wherever they run."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import amp_ext
from amp_ext.autocast.op_lists import MODULES

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
X = torch.linspace(-1, 1, 16).view(4, 4)
region = functools.partial(amp_ext.autocast, "cpu", FP16)

OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: F.softmax(x, -1),
    "aten::log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (4,), X[0], X[1]),
    "gelu": F.gelu,
    "sum": lambda x: x.sum(0),
    "add": lambda x: x + x,
    "mse_loss": lambda x: F.mse_loss(x, X),
    "cat": lambda x: torch.cat([x, X]),
    "bmm": lambda x: torch.bmm(x[None], X[None]),
    "linear": lambda x: F.linear(x, X),
    "matmul": lambda x: x @ X,
    "conv1d": lambda x: F.conv1d(x[None], X[None]),
    "conv2d": lambda x: F.conv2d(x[:, :, None], X[:, :, None, None]),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x, x, x),
}


@pytest.mark.parametrize("name", OPS)
def test_the_type_of_a_listed_op(name: str) -> None:
    """Whatever torch would do, and whatever the type of its first argument."""
    for x in (X, X.half()):
        with region(custom_fp32_ops=[name]):
            assert OPS[name](x).dtype == FP32
        for low in (FP16, BF16):
            with amp_ext.autocast("cpu", low, custom_fp16_ops={name}):
                assert OPS[name](x).dtype == low
        with region():
            as_ever = OPS[name](x)
        with torch.autocast("cpu", FP16):
            assert as_ever.dtype == OPS[name](x).dtype
    assert OPS[name](X).dtype == FP32


def test_values_are_those_of_the_type() -> None:
    """A forced op computes in its type, and does not cast its result."""
    product = F.linear(X, X)
    with region(custom_fp32_ops=["linear"], custom_fp16_ops=["softmax"]):
        assert torch.equal(F.linear(X, X), product)
        assert torch.equal(F.softmax(X, -1), F.softmax(X.half(), -1))
        assert torch.equal(F.softmax(X.double(), -1), F.softmax(X.double(), -1, dtype=FP64))


def test_regions_nest_and_end() -> None:
    """An inner region adds to the lists and takes precedence; one that is off has none."""

    def types() -> list[torch.dtype]:
        return [(X @ X).dtype, F.softmax(X, -1).dtype, F.gelu(X.half()).dtype]

    with region(custom_fp32_ops=["matmul", "gelu"]):
        assert types() == [FP32, FP32, FP32]
        with amp_ext.autocast("cpu", BF16, custom_fp16_ops=["matmul", "softmax"]):
            assert types() == [BF16, BF16, FP32]
            with torch.autocast("cpu", enabled=False):
                assert types() == [FP32, FP32, FP16]
        with region():
            assert types() == [FP32, FP32, FP32]
        with pytest.raises(ZeroDivisionError), region(custom_fp16_ops=["softmax"]):
            raise ZeroDivisionError
        assert types() == [FP32, FP32, FP32]
    with region(enabled=False, custom_fp16_ops=["softmax"]), region():
        assert types() == [FP16, FP32, FP16]


def test_other_threads_are_left_alone() -> None:
    seen = []

    def elsewhere() -> None:
        with region():
            seen.append(F.softmax(X, -1).dtype)

    with region(custom_fp16_ops=["softmax"]):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        seen.append(F.softmax(X, -1).dtype)
    assert seen == [FP32, FP16]


def test_as_a_decorator() -> None:
    @region(custom_fp16_ops=["softmax"])
    def scores(depth: int) -> Tensor:
        return scores(depth - 1) if depth else F.softmax(X, -1)

    assert scores(2).dtype == FP16
    assert F.softmax(X, -1).dtype == FP32


def test_gradients_are_those_of_the_types() -> None:
    """That of a float32 weight is float32; the op's, rounded to float16 where it runs in it."""
    weight = X.clone().requires_grad_()
    with region(custom_fp32_ops=["linear"], custom_fp16_ops=["gelu"]):
        loss = F.gelu(F.linear(X, weight)).float().sum()
    loss.backward()
    again = X.clone().requires_grad_()
    F.gelu(F.linear(X, again).half()).float().sum().backward()
    assert weight.grad.dtype == FP32
    assert torch.equal(weight.grad, again.grad)


def test_products_come_from_our_kernels_where_they_are_not_listed() -> None:
    """After the list is gone, and after install and uninstall, too: weight gradients above 65504,
    which torch's overflow."""

    def gradient(region: Any) -> Tensor:
        weight = torch.ones(1, 1, requires_grad=True)
        with region:
            F.linear(torch.full((2, 1), 60000.0), weight).float().sum().backward()
        return weight.grad

    with region(custom_fp16_ops=["linear"], custom_fp32_ops=["linear_backward"]):
        assert gradient(region()).item() == 120000
    assert gradient(region()).item() == 120000
    assert gradient(torch.autocast("cpu", FP16)).isinf()
    amp_ext.install()
    try:
        assert gradient(torch.autocast("cpu", FP16)).item() == 120000
    finally:
        amp_ext.uninstall()
    assert gradient(torch.autocast("cpu", FP16)).isinf()
    with region(custom_fp32_ops=["linear"]):
        assert F.linear(X, X).dtype == FP32
    assert gradient(region()).item() == 120000


# ---- checkpoints -------------------------------------------------------------------------------

reentrant = pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])


class Recorded:
    """A function whose every pass, recomputations too, notes in which types its ops ran."""

    def __init__(self) -> None:
        self.types: list[torch.dtype] = []

    def __call__(self, x: Tensor) -> Tensor:
        x = x * 1.0
        x = F.softmax(x, -1)
        self.types.append(x.dtype)
        return torch.tanh(x).float()


@reentrant
@pytest.mark.parametrize("nested", [False, True], ids=["", "nested"])
def test_a_recomputation_has_the_lists_of_its_region(reentrant: bool, nested: bool) -> None:
    """Of several regions, with and without lists, and of none; the backward pass is in another."""
    recorded = [Recorded() for _ in range(4)]
    again = functools.partial(checkpoint, use_reentrant=reentrant)
    x = X.clone().requires_grad_()
    h = x
    for function, names in zip(recorded, (["softmax"], [], ["gelu"], None), strict=True):
        inner = functools.partial(again, function) if nested else function
        if names is None:
            h = again(inner, h)
            continue
        with region(custom_fp16_ops=names):
            h = again(inner, h)
    with region(custom_fp16_ops=["softmax", "tanh"]):
        pass
    h.sum().backward()
    firsts = [FP16, FP32, FP32, FP32]
    for function, first in zip(recorded, firsts, strict=True):
        assert set(function.types) == {first}
        assert len(function.types) >= 2
    assert F.softmax(X, -1).dtype == FP32


@reentrant
def test_a_backward_pass_within_a_region_has_its_own_lists_still(reentrant: bool) -> None:
    listed, plain = Recorded(), Recorded()
    x = X.clone().requires_grad_()
    with region(custom_fp16_ops=["softmax"]):
        h = checkpoint(listed, x, use_reentrant=reentrant)
    with region():
        h = checkpoint(plain, h, use_reentrant=reentrant)
    with region(custom_fp16_ops=["softmax"]):
        h.sum().backward()
        assert F.softmax(X, -1).dtype == FP16
    assert (set(listed.types), set(plain.types)) == ({FP16}, {FP32})


def test_a_region_in_the_checkpointed_function() -> None:
    function = Recorded()

    def within(x: Tensor) -> Tensor:
        with region(custom_fp16_ops=["softmax"]):
            return function(x)

    x = X.clone().requires_grad_()
    checkpoint(within, x, use_reentrant=True).sum().backward()
    assert function.types == [FP16, FP16]


def test_a_recomputation_whose_lists_are_forgotten_is_an_error() -> None:
    x = X.clone().requires_grad_()
    with region(custom_fp16_ops=["softmax"]):
        h = checkpoint(Recorded(), x, use_reentrant=True)
    for _ in range(3000):
        with region(custom_fp16_ops=["gelu"]):
            h = h * 1
        h = h * 1
    with pytest.raises(RuntimeError, match=r"cannot be recomputed.*within the checkpointed"):
        h.sum().backward()


# ---- torch.compile -----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions_refuse_listed_ops(backend: str) -> None:
    """Also those that were compiled under other lists, or none; without listed ops they run."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: F.softmax(x, -1), backend=backend, fullgraph=True)
    with region():
        assert compiled(X).dtype == FP32
    with region(custom_fp16_ops=["gelu"]):
        assert compiled(X).dtype == FP32
    refuses = pytest.raises(
        Exception, match=r"torch.compile .*do not take custom_fp16_ops.*softmax"
    )
    with refuses, region(custom_fp16_ops=["softmax"]):
        compiled(X)
    with region():
        assert compiled(X).dtype == FP32

    def enters(x: Tensor) -> Tensor:
        with region(custom_fp16_ops=["softmax"]):
            return F.softmax(x, -1)

    with pytest.raises(Exception, match=r"torch.compile does not take custom_fp16_ops"):
        torch.compile(enters, backend=backend, fullgraph=True)(X)
    torch._dynamo.reset()


# ---- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "error", "text"),
    [
        (["sofmax"], ValueError, "'sofmax' is no op of torch's; the closest names are softmax"),
        (["aten::bnm"], ValueError, "'aten::bnm' is no op of torch's; .*bmm"),
        (["nonsense::op"], ValueError, "'nonsense::op' is no op"),
        (["softmax", "add_"], ValueError, "'add_' writes to its argument"),
        (["view"], ValueError, "'view' .*returns a view"),
        (["to"], ValueError, "'to' .*view"),
        (["batch_norm"], ValueError, "'batch_norm' writes to its argument"),  # running_mean
        (["_to_copy"], ValueError, "'_to_copy' converts types itself"),
        (["arange"], ValueError, "'arange' takes no tensor"),
        ("softmax", TypeError, "several names, as {'softmax'}, got 'softmax'"),
        (3, TypeError, "several names, .* got 3"),
        ([F.softmax], TypeError, "names of ops, as 'softmax', or .* got <function"),
        ([nn.LSTM], ValueError, "LSTM is none of the modules .*apply_policy.*only=LSTM"),
        (["Dropout2d"], ValueError, "Dropout2d is none of the modules"),
    ],
)
def test_bad_names(names: Any, error: type[Exception], text: str) -> None:
    for argument in ("custom_fp16_ops", "custom_fp32_ops"):
        with pytest.raises(error, match=f"amp_ext.autocast: {argument}.*{text}"):
            region(**{argument: names})


def test_bad_pairs_and_devices() -> None:
    with pytest.raises(ValueError, match=r"aten::mm is both in custom_fp16_ops and"):
        region(custom_fp16_ops=["mm"], custom_fp32_ops=["aten::mm"])
    with pytest.raises(ValueError, match=r"custom_fp16_ops.*are for 'cpu' and 'cuda', got .*'xpu'"):
        amp_ext.autocast("xpu", FP16, custom_fp16_ops=["mm"])


def test_binary_cross_entropy() -> None:
    """torch refuses it on a GPU."""
    with pytest.raises(ValueError, match="binary_cross_entropy_with_logits"):
        region(custom_fp16_ops=["binary_cross_entropy"])
    with region(custom_fp32_ops=["binary_cross_entropy"]):
        assert F.binary_cross_entropy(X.half().sigmoid(), X.sigmoid()).dtype == FP32


INPUTS = {nn.Conv1d: (2, 4, 4), nn.Conv3d: (2, 4, 4, 4, 4)}
ARGUMENTS = {
    nn.Bilinear: (4, 4, 4),
    nn.Linear: (4, 4),
    nn.GroupNorm: (2, 4),
    nn.Softmax: (-1,),
    nn.LogSoftmax: (-1,),
}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_a_module_stands_for_its_op(module: type[nn.Module], named: bool) -> None:
    name = module.__name__
    sizes = (4, 4, 1) if "Conv" in name else (4,) if "Norm" in name else ()
    layer = module(*ARGUMENTS.get(module, sizes))
    shape = (2, 4, 4, 4) if "2d" in name else INPUTS.get(module, (2, 4))
    takes_two = module is nn.Bilinear or name.endswith("Loss")
    values = [torch.randn(shape, dtype=torch.bfloat16) for _ in range(1 + takes_two)]
    lists = {"custom_fp32_ops": [name if named else module]}
    with amp_ext.autocast("cpu", torch.bfloat16, **lists):
        assert layer(*values).dtype == torch.float32
    low = {"custom_fp16_ops": [name if named else module]}
    with amp_ext.autocast("cpu", torch.bfloat16, **low):
        assert layer(*(value.float() for value in values)).dtype == torch.bfloat16


def test_casts_are_of_the_weights_as_they_are() -> None:
    """In a region of another dtype, and after an update in place."""
    layer, x = nn.LayerNorm(4, bias=False), torch.randn(3, 4)
    with amp_ext.autocast("cpu", FP16, custom_fp16_ops={"layer_norm"}):
        first = layer(x)
        with amp_ext.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        with torch.no_grad():
            layer.weight.mul_(2)
        assert torch.equal(layer(x), 2 * first)


def test_a_listed_einsum_keeps_float32_gradients() -> None:
    x, weight = torch.ones(2, 3, dtype=FP16), torch.ones(4, 3, requires_grad=True)
    with amp_ext.autocast("cpu", FP16, custom_fp16_ops={"einsum"}):
        product = torch.einsum("ij,kj->ik", x, weight)
    product.backward(torch.full_like(product, 4e4))
    assert weight.grad.tolist() == [[8e4] * 3] * 4
