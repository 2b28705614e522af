"""bench/bench_gemm.py, bench_linear.py and bounds.py: right products pass, wrong ones do not."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ops import gemm as bench_gemm
from ops import linear as bench_linear
from harness import bounds
from harness import registry
from ops.gemm import Operands
from harness.bounds import Bounded, compare_norms
from workloads.gemm_shapes import Shape
from harness.providers import Line
from harness.registry import BF16, FP16, FP32, CheckError

CPU = torch.device("cpu")
halves = pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])


# ---- bounds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", [FP16, BF16, FP32], ids=["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("k", [16384, 128256])
def test_lost_columns_of_a_long_sum_are_found(out: torch.dtype, k: int) -> None:
    a, b = torch.randn(8, k).to(BF16), torch.randn(k, 16).div(k**0.5).to(BF16)
    total = Bounded.exact(a) @ Bounded.exact(b)
    total = total if out == FP32 else total.rounded(out)
    total.compare((a.float() @ b.float()).to(out), "the product")
    lost = (a[:, 64:].float() @ b[64:].float()).to(out)
    with pytest.raises(CheckError, match="an element of the product"):
        total.compare(lost, "the product")


@halves
def test_sums_of_rounded_parts(dtype: torch.dtype) -> None:
    """Four parts, and their sums, rounded to 16 bits: as torch's library may, and no other."""
    a, b = torch.randn(64, 400).to(dtype), torch.randn(400, 64).div(400**0.5).to(dtype)
    total = Bounded.exact(a) @ Bounded.exact(b)
    result = torch.zeros(64, 64, dtype=dtype)
    for s in range(0, 400, 100):
        result += (a[:, s : s + 100].float() @ b[s : s + 100].float()).to(dtype)
    total.in_parts(400, dtype).rounded(dtype).compare(result, "the sum")
    with pytest.raises(CheckError):
        total.rounded(dtype).compare(result, "the sum")


def test_a_wrong_result_leaves_the_others_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong with one; the exact product is computed once for all."""
    monkeypatch.setattr(bounds, "ROWS", 16)
    products = []
    matmul = Bounded.__matmul__
    monkeypatch.setattr(
        Bounded, "__matmul__", lambda a, b: products.append(a.value.shape) or matmul(a, b)
    )
    a, b, c = torch.randn(40, 24).half(), torch.randn(24, 8).half(), torch.randn(40, 8)
    right = torch.addmm(c, a.float(), b.float())
    last = right.clone()
    last[-1, -1] += 1
    results = {"right": right, "last": last, "nan": right * math.nan, "short": right[:-1]}
    wrong = bounds.compare_products(
        a, b, {name: (result, lambda total: total) for name, result in results.items()}, c
    )
    assert list(wrong) == ["short", "nan", "last"]
    assert wrong["short"] == "CheckError: short's result is of shape (39, 8)"
    assert wrong["last"].startswith("CheckError: an element of last's result is")
    assert products == [(16, 24), (16, 24), (8, 24)]


def test_norms_of_blocks() -> None:
    matrix = torch.randn(300, 130)
    norms = bounds.block_norms(matrix)
    assert norms.shape == (2, 1)
    assert torch.allclose(norms[0, 0], matrix[:150].double().norm())
    vector = torch.randn(256)
    assert torch.allclose(bounds.block_norms(vector)[0, 1], vector[128:].double().norm())
    assert bounds.block_norms(vector[:5]).shape == (1, 1)


@halves
def test_norms_see_what_is_small_everywhere(dtype: torch.dtype) -> None:
    exact = torch.randn(256, 256).double()
    compare_norms(exact.to(dtype), exact, 1, "it")
    compare_norms(torch.zeros(3, dtype=dtype), torch.zeros(3).double(), 1, "it")
    off = exact.clone()
    off[128:, :128] *= 1 + 2 * torch.finfo(dtype).eps
    with pytest.raises(CheckError, match=r"a block of it is 2\.\d\d times as far off"):
        compare_norms(off.to(dtype), exact, 1, "it")
    compare_norms(off.to(dtype), exact, 1, "it", units=4.0)
    off[0, 0] = math.nan
    with pytest.raises(CheckError, match="a block of it is nan times"):
        compare_norms(off.to(dtype), exact, 1, "it")
    with pytest.raises(CheckError, match="it is of shape"):
        compare_norms(off[0].to(dtype), exact, 1, "it")


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
    trial = bench_gemm.build(shape, dtype, CPU)
    names = [provider.name for provider in trial.providers]
    assert names == ["cpu", "torch", "fp32"]
    for provider in trial.providers:
        provider.launch()
        provider.launch()
    assert trial.verify(names) == {}


def test_a_wrong_product_costs_its_own_ratio() -> None:
    def fails(shape: Shape, given: Operands) -> Tensor:
        raise RuntimeError("no such kernel")

    wrong = bench_gemm.verify(
        SHAPES[0],
        Operands.of(SHAPES[0], FP16, CPU),
        {
            "ours": Line(bench_gemm.ours),
            "fails": Line(fails),
            "torch": Line(bench_gemm.theirs),
            "off": Line(lambda shape, given: bench_gemm.ours(shape, given) + 1),
            "fp32": Line(bench_gemm.in_fp32),
        },
    )
    assert list(wrong) == ["fails", "off"]
    assert wrong["fails"] == "RuntimeError: no such kernel"
    assert wrong["off"].startswith("CheckError: an element of off's result is")


def test_a_result_of_another_dtype_is_refused() -> None:
    shape = SHAPES[1]
    given = Operands.of(shape, FP16, CPU)
    short = Line(lambda shape, given: bench_gemm.ours(shape, given).half())
    wrong = bench_gemm.verify(shape, given, {"cpu": short})
    assert wrong == {"cpu": "CheckError: cpu's result is torch.float16, not torch.float32"}


@pytest.mark.parametrize("name", ["torch", "library", "cpu"])
def test_who_may_add_up_rounded_parts(name: str) -> None:
    """torch's product, also where amp_ext takes it."""
    shape = Shape("forward", 32, 24, 512, "NN")

    def in_parts(shape: Shape, given: Operands) -> Tensor:
        a, b = given.a.float(), given.b.float()
        halves = (a[:, s : s + 128] @ b[s : s + 128] for s in range(0, 512, 128))
        return sum(half.half() for half in halves)

    wrong = bench_gemm.verify(shape, Operands.of(shape, FP16, CPU), {name: Line(in_parts)})
    assert list(wrong) == ([name] if name == "cpu" else [])


@pytest.mark.parametrize(
    ("setup", "name", "provider"),
    [
        (registry.Setup(torch.device("cuda")), "torch.mm 8192^3 NN fp16", None),
        (registry.Setup(torch.device("cuda"), dtype=BF16), "torch.mm 8192^3 NN bf16", None),
        (registry.Setup(CPU), "torch.mm 2048^3 NN fp32", None),
        (registry.Setup(CPU, quick=True), "torch.mm 128^3 NN fp32", "fp32"),
    ],
)
def test_limit(setup: registry.Setup, name: str, provider: str | None) -> None:
    case = bench_gemm.limit(setup)
    assert (case.name, case.limit) == (name, True)
    assert registry.NAMES[case.dtype] == name.split()[-1]
    if provider:
        (line,) = case.build().providers
        assert line.name == provider
        assert line.launch().dtype == case.dtype


@pytest.mark.parametrize("op", [bench_gemm, bench_linear])
def test_cases_say_their_dtype(op) -> None:
    for device in (CPU, torch.device("cuda")):
        for case in op.OP.cases(registry.Setup(device)):
            assert case.name.startswith(registry.NAMES[case.dtype])


def test_tuner_computes_the_reference_once(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """On a CPU, with other plans: the wrong ones are not timed."""
    from gpu import tune_gemm

    plans = [tune_gemm.Candidate(tile, (1, 1), 1, 0) for tile in range(3)]
    calls, timed = [], []
    verify = tune_gemm.verify

    def verify_once(shape, given, lines):
        calls.append(list(lines))
        wrong = {plans[0].words(): Line(lambda shape, given: bench_gemm.ours(shape, given) + 1)}
        return verify(shape, given, {**lines, **wrong})

    def interleaved(lines, budget, events):
        timed.extend(line.name for line in lines)
        us = {"planner": 3.0, plans[1].words(): 2.0, plans[2].words(): 1.0}
        return {line.name: SimpleNamespace(p20=us[line.name]) for line in lines}

    around = registry.Provider("", print).around
    monkeypatch.setattr(tune_gemm, "candidates", lambda shape: iter(plans))
    monkeypatch.setattr(tune_gemm, "forced", lambda plan: around())
    monkeypatch.setattr(tune_gemm, "verify", verify_once)
    monkeypatch.setattr(tune_gemm, "interleaved", interleaved)
    monkeypatch.setattr(tune_gemm.torch, "device", lambda name: CPU)
    tuned = tune_gemm.tune(SHAPES[1])
    assert tuned.entry == tune_gemm.entry(SHAPES[1], plans[2])
    assert list(tuned.wrong) == [plans[0].words()]
    assert calls == [["planner", *(plan.words() for plan in plans)]]
    assert timed == ["planner", plans[1].words(), plans[2].words()]
    assert "far off as it may be" in capsys.readouterr().err


# ---- linear ------------------------------------------------------------------------------------

MLP = bench_linear.Block("MLP", tokens=16, width=128, hidden=8192)


@torch.no_grad()
def forward(
    layers: bench_linear.Layers,
    x: Tensor,
    *,
    biases: tuple[bool, bool] = (True, True),
    lost: int = 0,
    approximate: str = "none",
) -> Tensor:
    """An MLP with faults: without a bias, without the last columns of fc2's k, by another GELU."""
    first, second = (
        layer.bias.float() if used else None
        for layer, used in zip((layers.fc1, layers.fc2), biases, strict=True)
    )
    before = F.linear(x.float(), layers.fc1.weight.float(), first).to(x.dtype).float()
    hidden = F.gelu(before, approximate=approximate).to(x.dtype).float()
    left = hidden.shape[1] - lost
    out = F.linear(hidden[:, :left], layers.fc2.weight[:, :left].float(), second)
    return out.to(x.dtype)


@pytest.fixture(scope="module", params=[FP16, BF16, FP32], ids=["fp16", "bf16", "fp32"])
def mlp(request) -> Callable[..., None]:
    """Compares the forward pass of MLP with what is expected; options as for forward."""
    layers = bench_linear.Layers(MLP, request.param, CPU)
    x, grad = (torch.randn(MLP.tokens, MLP.width).to(request.param) for _ in range(2))
    expected = bench_linear.Expected(layers, x, grad)
    return lambda **faults: expected.compare("cpu", [forward(layers, x, **faults)])


def test_a_right_mlp_passes(mlp) -> None:
    mlp()


@pytest.mark.parametrize("biases", [(False, True), (True, False)])
def test_a_dropped_bias_is_found(mlp, biases: tuple[bool, bool]) -> None:
    with pytest.raises(CheckError, match="of cpu's result is"):
        mlp(biases=biases)


def test_lost_columns_of_the_second_layer_are_found(mlp) -> None:
    with pytest.raises(CheckError, match="of cpu's result is"):
        mlp(lost=64)


def test_the_other_gelu_is_found_in_fp32() -> None:
    """In 16 bits it is within a rounding."""
    layers = bench_linear.Layers(MLP, FP32, CPU)
    x, grad = (torch.randn(MLP.tokens, MLP.width) for _ in range(2))
    expected = bench_linear.Expected(layers, x, grad)
    with pytest.raises(CheckError, match="a block of cpu's result is"):
        expected.compare("cpu", [forward(layers, x, approximate="tanh")])


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("kind", ["linear+GELU", "MLP", "norm+MLP"])
def test_layers_pass(kind: str, dtype: torch.dtype) -> None:
    block = bench_linear.Block(kind, tokens=64, width=96, hidden=160)
    for backward in (False, True):
        trial = bench_linear.build(block, dtype, backward, registry.Setup(CPU))
        assert trial.verify(["cpu", "torch"]) == {}


def test_a_failing_layer_costs_its_own_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    references = []
    made = bench_linear.Expected.__init__
    monkeypatch.setattr(
        bench_linear.Expected, "__init__", lambda *given: references.append(made(*given))
    )
    block = bench_linear.Block("MLP", tokens=8, width=16, hidden=24)
    trial = bench_linear.build(block, FP16, True, registry.Setup(CPU))

    def fails(self, x: Tensor) -> Tensor:
        raise RuntimeError("no such layer")

    monkeypatch.setattr(bench_linear.Fused, "forward", fails)
    assert trial.verify(["cpu", "torch"]) == {"cpu": "RuntimeError: no such layer"}
    assert len(references) == 1


def test_a_gradient_too_few_is_found() -> None:
    block = bench_linear.Block("linear+GELU", tokens=8, width=16, hidden=24)
    layers = bench_linear.Layers(block, FP16, CPU)
    x, grad = torch.randn(8, 16).half().requires_grad_(), torch.randn(8, 24).half()
    variant = bench_linear.Variant(layers, list(layers.parameters()))
    results = bench_linear.Pass(variant, x, grad).run()
    expected = bench_linear.Expected(layers, x, grad)
    expected.compare("torch", results)
    with pytest.raises(CheckError, match="torch has 1 gradients"):
        expected.compare("torch", results[:-1])
    with pytest.raises(CheckError, match=re.escape("torch's result is torch.float32")):
        expected.compare("torch", [results[0].float(), *results[1:]])
