"""A wrong result gets no ratio, whichever op and provider it is of; the others keep theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

import amp_ext
from bench_program import BENCH, quiet, run_quick  # noqa: F401  (a fixture)
from harness import providers
from ops import autocast, cast, check_finite, gemm, grad_norm, unscale, update_scale

OPS = {name: getattr(amp_ext.ops, name) for name in amp_ext.ops.__all__}


def next_number(tensor):
    """The last element, in place, becomes its dtype's next number."""
    last = tensor.view(-1)[-1:]
    last.copy_(torch.nextafter(last, torch.full_like(last, torch.inf)))


def spoil(tensor):
    with torch.no_grad():
        tensor.view(-1)[-1] += 1.0
    return tensor


# ---- amp_ext's ops -----------------------------------------------------------------------------


def unscale_a_unit_off(grads, found_inf, inv_scale):
    OPS["unscale_"](grads, found_inf, inv_scale)
    next_number(grads[-1])


def unscale_without_check(grads, found_inf, inv_scale):
    torch._foreach_mul_(grads, inv_scale)


def unscale_to_infinity(grads, found_inf, inv_scale):
    """Spoils the gradients that all providers share."""
    for grad in grads:
        grad.fill_(torch.inf)


def check_that_writes(grads, found_inf):
    OPS["check_finite"](grads, found_inf)
    next_number(grads[-1])


def norm_without_the_last(grads, found_inf, inv_scale):
    return OPS["grad_norm"]([*grads[:-1], grads[-1].view(-1)[:-1]], found_inf, inv_scale)


def norm_a_bit_off(grads, found_inf, inv_scale):
    return OPS["grad_norm"](grads, found_inf, inv_scale) * (1 + 1e-6)


def update_a_unit_off(scale, *rest):
    OPS["update_scale_"](scale, *rest)
    next_number(scale.view(1))


def update_that_never_grows(scale, tracker, found_infs, growth, backoff, interval):
    OPS["update_scale_"](scale, tracker, found_infs, 1.0, backoff, interval)


def cast_a_unit_off(outputs, inputs):
    OPS["cast_"](outputs, inputs)
    next_number(outputs[-1])


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


def wrong_mlp(*arguments, **options):
    return spoil(OPS["mlp"](*arguments, **options))


FAULTS = [  # an op, a case that shows the fault, the function of amp_ext.ops, what replaces it
    ("unscale", "2 x 10", "unscale_", unscale_a_unit_off),
    ("unscale", "2 x 10", "unscale_", unscale_without_check),
    ("unscale", "2 x 10", "unscale_", unscale_to_infinity),
    ("check_finite", "2 x 10", "check_finite", check_that_writes),
    ("grad_norm", "16 x 64 Ki", "grad_norm", norm_without_the_last),
    ("grad_norm", "16 x 64 Ki", "grad_norm", norm_a_bit_off),
    ("update_scale", "8 found_infs, scale unmoved", "update_scale_", update_a_unit_off),
    ("update_scale", "8 found_infs, scale unmoved", "update_scale_", update_that_never_grows),
    ("cast", "2 x 10", "cast_", cast_a_unit_off),
    ("gemm", "p16 64^3", "gemm", gemm_without_one_product),
    ("gemm", "fp16 8B at 1/64 up accumulate", "gemm_accumulate_", accumulate_from_zero),
    ("linear", "fp16 linear+GELU 1B at 1/32, fwd+bwd", "linear", linear_with_a_wrong_gradient),
    ("linear", "fp16 MLP 1B at 1/32, fwd+bwd", "mlp", wrong_mlp),
]


@pytest.mark.parametrize(
    ("op", "text", "replaced", "fault"), FAULTS, ids=[fault.__name__ for *_, fault in FAULTS]
)
def test_wrong_op_gets_no_ratio(
    tmp_path, capsys, monkeypatch, op: str, text: str, replaced: str, fault: Callable
):
    """Of two backends the one that does wrong; its errors say what, and the other has a ratio."""

    @contextmanager
    def wrong() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(amp_ext.ops, replaced, fault)
            yield

    backends = {"cpu": nullcontext, "triton": wrong}
    monkeypatch.setattr(providers, "ours", lambda device, products=False: backends)
    status, (_, *records) = run_quick(tmp_path / "out.jsonl", op, "--filter", text)
    printed = capsys.readouterr().out
    assert status == 1
    assert "NO RATIO, CheckError: " in printed
    assert printed.splitlines()[-1].split()[-1] == "none"
    for record in records:
        if record["provider"] == "triton":
            assert record["error"].startswith("CheckError: ")
            assert record["ratio"] is None
        else:
            assert record["error"] is None, record
            assert (record["ratio"] is None) == (record["provider"] == record["baseline"])


@pytest.mark.parametrize(("op", "text"), [("cast", "2 x 10"), ("gemm", "fp16 64^3 NT")])
def test_a_backend_that_fails_leaves_the_others_their_ratios(tmp_path, monkeypatch, op, text):
    @contextmanager
    def fails() -> Iterator[None]:
        raise RuntimeError("no kernel image")
        yield

    backends = {"cpu": nullcontext, "triton": fails}
    monkeypatch.setattr(providers, "ours", lambda device, products=False: backends)
    status, (_, *records) = run_quick(tmp_path / "out.jsonl", op, "--filter", text)
    assert status == 1
    errors = {record["provider"]: record["error"] for record in records}
    assert errors.pop("triton") == "RuntimeError: no kernel image"
    assert set(errors.values()) == {None}
    assert all(record["ratio"] for record in records if record["provider"] == "cpu")


# ---- torch, made to do less or other work than amp_ext -----------------------------------------


def their_cast(outputs, inputs):
    torch._foreach_copy_(outputs, inputs)
    next_number(outputs[-1])


def their_product(shape, given):
    return spoil(torch.mm(*shape.views(given.a, given.b)))


BASELINES = {
    "unscale": (unscale, "2 x 10", lambda grads, flag, factor: None),
    "check_finite": (check_finite, "2 x 10", lambda grads, flag, one: None),
    "grad_norm": (grad_norm, "2 x 10", lambda grads, flag, inv_scale: torch.zeros(())),
    "update_scale": (update_scale, "1 found_inf, scale unmoved", lambda *_: None),
    "cast": (cast, "2 x 10", their_cast),
    "gemm": (gemm, "fp16 64^3 NT", their_product),
}


def errors(file, *options: str) -> dict[str, str]:
    """By provider, of the one case that the options leave, which has no ratio."""
    status, (_, *records) = run_quick(file, *options)
    assert all(record["ratio"] is None for record in records)
    assert len({record["case"] for record in records}) == 1
    assert status == 1
    return {record["provider"]: record["error"] for record in records if record["error"]}


@pytest.mark.parametrize("op", BASELINES)
def test_wrong_baseline_gives_no_ratio(tmp_path, monkeypatch, op):
    module, text, fault = BASELINES[op]
    monkeypatch.setattr(module, "theirs", fault)
    found = errors(tmp_path / "out.jsonl", op, "--filter", text)
    assert list(found) == ["torch"]
    assert found["torch"].startswith("CheckError: ")


# ---- amp_ext's scaler and autocast -------------------------------------------------------------


class KeepsScale(torch.amp.GradScaler):
    def update(self, new_scale=None):
        super().update(self.get_scale())


class SpoilsAnElement(torch.amp.GradScaler):
    def unscale_(self, optimizer):
        super().unscale_(optimizer)
        next_number(optimizer.param_groups[0]["params"][-1].grad)


class ClipsToMore(amp_ext.GradScaler):
    def clip_grad_norm_(self, optimizer, max_norm):
        return super().clip_grad_norm_(optimizer, 1.001 * max_norm)


@pytest.mark.parametrize(
    ("scaler", "loop"),
    [(KeepsScale, "SGD"), (SpoilsAnElement, "SGD"), (ClipsToMore, "clipped SGD")],
)
def test_wrong_scaler_gets_no_ratio(tmp_path, monkeypatch, scaler, loop):
    monkeypatch.setattr(amp_ext, "GradScaler", scaler)
    found = errors(tmp_path / "out.jsonl", "scaler", "--filter", f"40 parameters, {loop}")
    assert list(found) == ["cpu"]
    assert found["cpu"].startswith("CheckError: after ")


class OtherDtype(torch.autocast):
    def __init__(self, device_type, dtype):
        super().__init__(device_type, torch.bfloat16)


def test_autocast_of_another_dtype_gets_no_ratio(tmp_path, monkeypatch):
    monkeypatch.setitem(autocast.REGIONS, "amp_ext", OtherDtype)
    found = errors(tmp_path / "out.jsonl", "autocast", "--filter", "fp16 mm, forward")
    assert found == {"cpu": "CheckError: the result is torch.bfloat16"}


@pytest.mark.parametrize("call", autocast.CALLS_MEASURED, ids=lambda call: call.name)
def test_right_gradients_of_many_calls_pass(call):
    """As many as are timed without --quick, the sums of whose gradients BF16 has to round."""
    mode, calls, device = autocast.BACKWARD, autocast.CALLS, torch.device("cpu")
    trial = autocast.build(call, mode, calls, torch.bfloat16, device)
    assert trial.verify(["cpu", "torch"]) == {}
