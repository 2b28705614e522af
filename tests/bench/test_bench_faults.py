"""Test that a wrong result of any op and provider gets no ratio, and the others keep theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

import amp_ext
from bench_program import quiet, run_quick  # noqa: F401  (a fixture)
from harness import providers, registry
from harness.bounds import compare
from ops import autocast, gemm

OPS = {name: getattr(amp_ext.ops, name) for name in amp_ext.ops.__all__}


def next_number(tensor: torch.Tensor) -> None:
    """Replace the last element, in place, by its dtype's next number."""
    last = tensor.view(-1)[-1:]
    last.copy_(torch.nextafter(last, torch.full_like(last, torch.inf)))


def spoil(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        tensor.view(-1)[-1] += 1.0
    return tensor


def a_unit_off(op: str) -> Callable:
    """Return an op that moves the last element of its first list by a unit."""

    def wrong(tensors, *rest):
        OPS[op](tensors, *rest)
        next_number(tensors[-1])

    return wrong


def norm_a_bit_off(grads, found_inf, inv_scale):
    return OPS["grad_norm"](grads, found_inf, inv_scale) * (1 + 1e-6)


def update_that_never_grows(scale, tracker, found_infs, growth, backoff, interval):
    OPS["update_scale_"](scale, tracker, found_infs, 1.0, backoff, interval)


def gemm_without_one_product(a, b, *, trans_a, trans_b, out_dtype):
    a, b = (a.mT if trans_a else a).clone(), (b.mT if trans_b else b)
    a[-1, -1] = 0
    return OPS["gemm"](a, b, out_dtype=out_dtype)


def accumulate_from_zero(c, a, b, **options):
    OPS["gemm_accumulate_"](c.zero_(), a, b, **options)


class OneGradientOff(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return spoil(grad.clone())


def linear_with_a_wrong_gradient(x, weight, *rest, **options):
    return OPS["linear"](x, OneGradientOff.apply(weight), *rest, **options)


FAULTS = [  # an op, a case that shows the fault, the function of amp_ext.ops, its replacement
    ("unscale", "2 x 10", "unscale_", a_unit_off("unscale_")),
    ("check_finite", "2 x 10", "check_finite", a_unit_off("check_finite")),
    ("grad_norm", "16 x 64 Ki", "grad_norm", norm_a_bit_off),
    ("update_scale", "8 found_infs, scale unmoved", "update_scale_", update_that_never_grows),
    ("cast", "2 x 10", "cast_", a_unit_off("cast_")),
    ("gemm", "p16 64^3", "gemm", gemm_without_one_product),
    ("gemm", "fp16 8B at 1/64 up accumulate", "gemm_accumulate_", accumulate_from_zero),
    ("linear", "fp16 1B at 1/32, fwd+bwd", "linear", linear_with_a_wrong_gradient),
]


@pytest.mark.parametrize(
    ("op", "text", "replaced", "fault"), FAULTS, ids=[replaced for *_, replaced, _ in FAULTS]
)
def test_a_wrong_backend_gets_no_ratio_and_the_other_has_one(
    tmp_path: Path, capsys, monkeypatch, op: str, text: str, replaced: str, fault: Callable
) -> None:
    @contextmanager
    def wrong() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(amp_ext.ops, replaced, fault)
            yield

    backends = {"cpu": nullcontext, "triton": wrong}
    monkeypatch.setattr(providers, "ours", lambda device, products=False: backends)
    status, (_, *records) = run_quick(tmp_path / "out.jsonl", op, "--filter", text)
    assert status == 1
    assert "NO RATIO for " in capsys.readouterr().out
    for record in records:
        if record["provider"] == "triton":
            assert record["error"].startswith("CheckError: ")
            assert record["ratio"] is None
        else:
            assert record["error"] is None, record
            assert (record["ratio"] is None) == (record["provider"] == record["baseline"])


def their_product(shape, given):
    return spoil(torch.mm(*shape.views(given.a, given.b)))


class ClipsToMore(amp_ext.GradScaler):
    def clip_grad_norm_(self, optimizer, max_norm):
        return super().clip_grad_norm_(optimizer, 1.001 * max_norm)


class LosesEverySecondStep(amp_ext.GradScaler):
    steps = 0

    def step(self, optimizer):
        self.steps += 1
        if self.steps % 2:
            return super().step(optimizer)
        self.unscale_(optimizer)


class OtherDtype(torch.autocast):
    def __init__(self, device_type, dtype):
        super().__init__(device_type, torch.bfloat16)


@pytest.mark.parametrize(
    ("op", "text", "patched", "fault", "provider"),
    [
        ("gemm", "fp16 64^3 NT", (gemm, "theirs"), their_product, "torch"),
        ("scaler", "40 parameters, clipped SGD", (amp_ext, "GradScaler"), ClipsToMore, "cpu"),
        ("train", "regression", (amp_ext, "GradScaler"), LosesEverySecondStep, "cpu"),
        ("autocast", "fp16 mm, forward", (autocast.REGIONS, "amp_ext"), OtherDtype, "cpu"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_wrong_side_is_named(tmp_path, monkeypatch, op, text, patched, fault, provider) -> None:
    """A wrong baseline, scaler, training or region leaves our line without a ratio."""
    place, name = patched
    (monkeypatch.setitem if isinstance(place, dict) else monkeypatch.setattr)(place, name, fault)
    status, (_, *records) = run_quick(tmp_path / "out.jsonl", op, "--filter", text)
    assert status == 1
    assert len({record["case"] for record in records}) == 1
    assert "cpu" not in {record["provider"] for record in records if record["ratio"]}
    (error,) = [(each["provider"], each["error"]) for each in records if each["error"]]
    assert error[0] == provider
    assert error[1].startswith("CheckError: ")


# ---- bounds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", registry.DTYPES.values(), ids=list(registry.DTYPES))
def test_lost_columns_of_a_long_sum_are_found(dtype: torch.dtype) -> None:
    k = 16384
    a, b = torch.randn(8, k).bfloat16(), torch.randn(k, 16).div(k**0.5).bfloat16()
    exact = a.double() @ b.double()
    compare((a.float() @ b.float()).to(dtype), exact, k, dtype, "the product")
    lost = (a[:, 64:].float() @ b[64:].float()).to(dtype)
    with pytest.raises(registry.CheckError, match="of the product is"):
        compare(lost, exact, k, dtype, "the product")


def test_norms_see_an_error_that_is_small_everywhere() -> None:
    exact = torch.randn(256, 256).double()
    compare(exact.half(), exact, 1, torch.float16, "it")
    off = exact.clone()
    off[128:, :128] *= 1 + 3 * torch.finfo(torch.float16).eps
    for value, words in ((off[0, 0].item(), r"3\.00"), (torch.nan, "nan")):
        off[0, 0] = value
        with pytest.raises(registry.CheckError, match=f"a block of it is {words} times"):
            compare(off, exact, 1, torch.float16, "it")
