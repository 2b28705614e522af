"""bench's checks of products and layers: right ones pass, wrong ones do not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from harness import bounds
from harness.bounds import Bounded, compare_blocks
from harness.providers import Line
from harness.registry import BF16, FP16, FP32, CheckError
from ops import gemm, linear
from ops.gemm import Operands
from workloads.gemm_shapes import Shape

CPU = torch.device("cpu")
halves = pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])


# ---- bounds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", [FP16, BF16, FP32], ids=["fp16", "bf16", "fp32"])
def test_lost_columns_of_a_long_sum_are_found(out: torch.dtype) -> None:
    k = 16384
    a, b = torch.randn(8, k).to(BF16), torch.randn(k, 16).div(k**0.5).to(BF16)
    total = Bounded.product(a, b)
    total = total if out == FP32 else total.rounded(out)
    total.compare((a.float() @ b.float()).to(out), "the product")
    lost = (a[:, 64:].float() @ b[64:].float()).to(out)
    with pytest.raises(CheckError, match="an element of the product"):
        total.compare(lost, "the product")


@halves
def test_sums_of_rounded_parts(dtype: torch.dtype) -> None:
    """Four parts, and their sums, rounded to 16 bits: as torch's library may, and no other."""
    a, b = torch.randn(64, 400).to(dtype), torch.randn(400, 64).div(400**0.5).to(dtype)
    total = Bounded.product(a, b)
    result = torch.zeros(64, 64, dtype=dtype)
    for s in range(0, 400, 100):
        result += (a[:, s : s + 100].float() @ b[s : s + 100].float()).to(dtype)
    total.in_parts(400, dtype).rounded(dtype).compare(result, "the sum")
    with pytest.raises(CheckError):
        total.rounded(dtype).compare(result, "the sum")


def test_a_wrong_result_leaves_the_others_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong with one; the exact product is computed once for all."""
    monkeypatch.setattr(bounds, "ROWS", 16)
    a, b, c = torch.randn(40, 24).half(), torch.randn(24, 8).half(), torch.randn(40, 8)
    right = torch.addmm(c, a.float(), b.float())
    last = right.clone()
    last[-1, -1] += 1
    results = {"right": right, "last": last, "nan": right * math.nan, "short": right[:-1]}
    wrong = bounds.compare_products(
        a, b, {name: (result, lambda total: total) for name, result in results.items()}, c
    )
    assert list(wrong) == ["short", "nan", "last"]
    assert wrong["last"].startswith("CheckError: an element of last's result is")


@halves
def test_norms_see_what_is_small_everywhere(dtype: torch.dtype) -> None:
    exact = torch.randn(256, 256).double()
    compare_blocks(exact.to(dtype), exact, 1, "it")
    off = exact.clone()
    off[128:, :128] *= 1 + 2 * torch.finfo(dtype).eps
    with pytest.raises(CheckError, match=r"a block of it is 2\.\d\d times as far off"):
        compare_blocks(off.to(dtype), exact, 1, "it")
    off[0, 0] = math.nan
    with pytest.raises(CheckError, match="a block of it is nan times"):
        compare_blocks(off.to(dtype), exact, 1, "it")


# ---- gemm --------------------------------------------------------------------------------------


SHAPES = [
    Shape("forward", 32, 24, 40, "NT"),
    Shape("wgrad", 32, 24, 40, "TN", FP32),
    Shape("accumulate", 32, 24, 40, "TN", FP32, accumulate=True),
]


@halves
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_products_after_timing(shape: Shape, dtype: torch.dtype) -> None:
    """Every result is right, on operands to which timing has not added."""
    trial = gemm.build(shape, dtype, CPU)
    names = [provider.name for provider in trial.providers]
    assert names == ["cpu", "torch", "fp32"]
    for provider in trial.providers:
        provider.launch()
        provider.launch()
    assert trial.verify(names) == {}


def test_a_result_of_another_dtype_is_refused() -> None:
    given = Operands.of(SHAPES[1], FP16, CPU)
    short = Line(lambda shape, given: gemm.ours(shape, given).half())
    wrong = gemm.verify(SHAPES[1], given, {"cpu": short})
    assert wrong == {"cpu": "CheckError: cpu's result is torch.float16, not torch.float32"}


@pytest.mark.parametrize("name", ["torch", "library", "cpu"])
def test_who_may_add_up_rounded_parts(name: str) -> None:
    """torch's product, also where amp_ext takes it."""
    shape = Shape("forward", 32, 24, 512, "NN")

    def in_parts(shape: Shape, given: Operands) -> Tensor:
        a, b = given.a.float(), given.b.float()
        parts = (a[:, s : s + 128] @ b[s : s + 128] for s in range(0, 512, 128))
        return sum(part.half() for part in parts)

    wrong = gemm.verify(shape, Operands.of(shape, FP16, CPU), {name: Line(in_parts)})
    assert list(wrong) == ([name] if name == "cpu" else [])


# ---- linear ------------------------------------------------------------------------------------

MLP = linear.Block("MLP", tokens=16, width=128, hidden=8192)
FAULTS = [
    {},
    {"first_bias": False},
    {"second_bias": False},
    {"lost": 64},
    {"approximate": "tanh"},  # in 16 bits it is within a rounding
]


@torch.no_grad()
def forward(
    layers: linear.Layers,
    x: Tensor,
    *,
    first_bias: bool = True,
    second_bias: bool = True,
    lost: int = 0,
    approximate: str = "none",
) -> Tensor:
    """An MLP with faults: without a bias, without the last columns of fc2's k, by another GELU."""
    first, second = layers.fc1.bias.float() * first_bias, layers.fc2.bias.float() * second_bias
    before = F.linear(x.float(), layers.fc1.weight.float(), first).to(x.dtype).float()
    hidden = F.gelu(before, approximate=approximate).to(x.dtype).float()
    left = hidden.shape[1] - lost
    return F.linear(hidden[:, :left], layers.fc2.weight[:, :left].float(), second).to(x.dtype)


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=["fp16", "bf16", "fp32"])
def test_a_right_mlp_passes_and_a_wrong_one_does_not(dtype: torch.dtype) -> None:
    layers = linear.Layers(MLP, dtype, CPU)
    x, grad = (torch.randn(MLP.tokens, MLP.width).to(dtype) for _ in range(2))
    expected = linear.Expected(layers, x, grad)
    expected.compare("cpu", [forward(layers, x)])
    for fault in FAULTS[1 : None if dtype == FP32 else -1]:
        with pytest.raises(CheckError, match="of cpu's result is"):
            expected.compare("cpu", [forward(layers, x, **fault)])


def test_wrong_gradients_are_found() -> None:
    """One that is off, and one too few."""
    layers = linear.Layers(linear.Block("MLP", tokens=8, width=16, hidden=24), FP16, CPU)
    x, grad = torch.randn(8, 16).half().requires_grad_(), torch.randn(8, 16).half()
    results = linear.run_pass(layers, list(layers.parameters()), x, grad)
    expected = linear.Expected(layers, x, grad)
    expected.compare("torch", results)
    for place in range(len(results)):
        wrong = [result.detach().clone() for result in results]
        wrong[place].view(-1)[-1] += 1.0
        with pytest.raises(CheckError, match="torch's"):
            expected.compare("torch", wrong)
    with pytest.raises(CheckError, match="torch has 5 results"):
        expected.compare("torch", results[:-1])
