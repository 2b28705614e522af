"""Test that GradScaler.clip_grad_norm_ equals unscale_ and torch.nn.utils.clip_grad_norm_."""

import contextlib
import gc
import math
import weakref
from functools import partial
from typing import Any

import pytest
import torch

import amp_ext.optim
import twins
from amp_ext._library import _C
from cases import unwritten
from twins import OURS, Clip, finish, grads, leaf, params, plain, sgd, started, with_parameters

STEPPED = {kind: partial(make, lr=0.5) for kind, make in twins.KINDS.items()}
STEP_CLIPS = {kind: make for kind, make in STEPPED.items() if kind != "host"}
"""Optimizers whose step unscales and clips."""


def half(norm: float) -> float:
    """Return the max_norm for a clip coefficient of exactly 1/2."""
    return (torch.tensor(norm) + 1e-6).item() / 2


@with_parameters
@pytest.mark.parametrize("device", twins.DEVICES)
@pytest.mark.parametrize("max_norm", [torch.tensor(half(13.0)), "0.0", math.inf], ids=str)
@pytest.mark.parametrize("make", STEPPED)
def test_a_clipped_step(make: str, max_norm: Any, device: str, clip: Clip) -> None:
    """Gradients of several dtypes are unscaled by 4 and clipped: 3, 4 and 12 have a norm of 13.

    The limit is whatever float() takes.
    """
    optimizer = STEPPED[make](
        [
            leaf([12.0], torch.float32, device),
            leaf([-16.0], torch.float64, device),
            leaf([48.0], torch.float32 if device == "cuda" else torch.bfloat16, device),
        ]
    )
    scaler = started(OURS, device=device, growth_interval=1)
    norm = clip(scaler, optimizer, max_norm)
    assert plain(norm) == plain(torch.tensor(13.0))
    assert norm.device == scaler._scale.device
    scaler.step(optimizer)
    step = 0.5 * min(1.0, float(max_norm) / 13.0)
    expected = [1.0 - step * grad for grad in (3.0, -4.0, 12.0)]
    assert [param.item() for param in params(optimizer)] == pytest.approx(expected, abs=2.0**-18)
    scaler.update()
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("make", STEP_CLIPS)
def test_gradients_are_only_read_where_the_step_clips(make: str) -> None:
    """If the step clips, gradients are only read; float16 ones are not unscaled in float16."""
    optimizer, scaler = STEP_CLIPS[make]([leaf([12.0, 16.0], torch.float16)]), started(OURS)
    with unwritten(grads(optimizer)):
        assert scaler.clip_grad_norm_(optimizer, 1.0).item() == 5.0


# ---- clipped parameters --------------------------------------------------------------------------


@with_parameters
def test_sparse_gradients_count_with_their_duplicates_added_up(clip: Clip) -> None:
    """Sparse gradients count with duplicates added up.

    4 and 5 + 7 are a norm of 4, and of 3 after unscaling by 4: torch cannot do this at all.
    """
    param = twins.sparse_leaf(torch.float32, (16.0, 20.0, 28.0))
    optimizer = sgd(param, leaf([12.0]))
    assert clip(started(OURS), optimizer, 6.5).item() == 13.0
    assert param.grad.is_coalesced()
    torch.testing.assert_close(param.grad._values(), torch.tensor([2.0, 6.0]))
    torch.testing.assert_close(grads(optimizer)[1], torch.tensor([1.5]))


def test_fp16_gradients() -> None:
    optimizer = sgd(leaf([12.0, 16.0], torch.float16))
    with unwritten(grads(optimizer)), pytest.raises(ValueError, match="unscale FP16 gradients"):
        started(OURS).clip_grad_norm_(optimizer, 1.0)
    scaler = started(OURS, allow_fp16_grads=True)
    assert scaler.clip_grad_norm_(optimizer, 2.5).item() == 5.0
    assert grads(optimizer)[0].tolist() == [1.5, 2.0]


@pytest.mark.parametrize("clip", [None, twins.at_once, twins.after_unscale])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("make", [torch.optim.SGD, twins.StepsByScalars, amp_ext.optim.SGD])
def test_no_gradients(make: Any, fused: bool, clip: Clip | None) -> None:
    """A step without gradients is an error. A fused step does nothing, as in torch."""
    scaler, optimizer = started(OURS), make([torch.ones(2)], lr=0.5, fused=fused)
    if clip is not None:
        assert plain(clip(scaler, optimizer, 1.0)) == plain(torch.tensor(0.0))
    helps = r"No inf checks were .* other parameters .* zero_grad\(\) .* allow_no_grads=True"
    error = pytest.raises(AssertionError, match=helps)
    with contextlib.nullcontext() if fused else error:
        scaler.step(optimizer)
    assert params(optimizer)[0].tolist() == [1.0, 1.0]


@with_parameters
def test_tensor_subclass_gradients_take_torchs_way(clip: Clip) -> None:
    inner = torch.tensor([12.0, 16.0])
    param = twins.Wrapped(torch.ones(2))
    param.grad = twins.Wrapped(inner)
    optimizer = sgd(leaf([48.0]))
    optimizer.param_groups[0]["params"].append(param)
    assert clip(started(OURS), optimizer, 6.5).inner.item() == 13.0
    torch.testing.assert_close(inner, torch.tensor([1.5, 2.0]))
    torch.testing.assert_close(grads(optimizer)[0], torch.tensor([6.0]))


def test_disabled_scaler_clips_as_torch() -> None:
    theirs, ours = (sgd(leaf([[3.0, 4.0]], torch.float64), torch.ones(2)) for _ in range(2))
    norm = twins.clip_as_torch(params(theirs), 1.0)
    scaler = OURS("cpu", enabled=False)
    assert plain(scaler.clip_grad_norm_(ours, 1.0)) == plain(norm)
    assert plain(grads(ours)) == plain(grads(theirs))
    grads(ours)[0].fill_(math.nan)
    with pytest.raises(RuntimeError, match="non-finite"):
        scaler.clip_grad_norm_(ours, 1.0, error_if_nonfinite=True)


# ---- norms of other orders -----------------------------------------------------------------------


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("norm_type", [math.inf, 1.0, 3, "inf"])
@pytest.mark.parametrize("make", ["fused", "amp_ext.optim"])
def test_norms_of_other_orders(make: str, norm_type: Any, alone: bool) -> None:
    """Norms of other orders are computed at once by torch's code, unscaled and clipped."""
    ours, theirs = STEP_CLIPS[make]([leaf([12.0, 16.0])]), sgd(leaf([3.0, 4.0]))
    scaler = started(OURS)
    norm = scaler.clip_grad_norm_(params(ours) if alone else ours, 2.0, norm_type)
    assert plain(norm) == plain(twins.clip_as_torch(params(theirs), 2.0, norm_type=norm_type))
    assert plain(grads(ours)) == plain(grads(theirs))
    finish(scaler, ours)
    assert plain(params(ours)[0]) == plain(1.0 - 0.5 * grads(theirs)[0])


# ---- parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("bad", ["", "inf", "norm"])
@pytest.mark.parametrize("make", STEPPED)
def test_parameters_of_several_optimizers_have_one_norm(
    make: str, bad: str, unscale_first: bool
) -> None:
    """Parameters of several optimizers have one norm: 3, 4 and 12 have a norm of 13.

    No optimizer steps after an overflow or with a norm above the limit, unscaled before or not.
    """
    first = STEPPED[make]([leaf([12.0, 16.0])])
    second = STEPPED[make]([leaf([math.inf if bad == "inf" else 48.0]), torch.ones(1)])
    scaler = started(OURS, skip_above_norm=12.5 if bad == "norm" else None)
    weights = [*params(first), *params(second)]
    if unscale_first:
        scaler.unscale_(first)
    norm = scaler.clip_grad_norm_(weights, half(13.0))
    assert norm.item() == (math.inf if bad == "inf" else 13.0)
    finish(scaler, first, second)
    assert scaler.step_was_skipped == bool(bad)
    assert scaler.get_scale() == (2.0 if bad == "inf" else 4.0)
    after = [weight.tolist() for weight in weights]
    assert after == ([[1.0, 1.0], [1.0], [1.0]] if bad else [[0.25, 0.0], [-2.0], [1.0]])


@pytest.mark.parametrize("bad", [None, 0, 2])
@pytest.mark.parametrize("make", STEPPED)
def test_parameters_in_parts(make: str, bad: int | None) -> None:
    """Each part of the parameters has its norm; the step unscales the rest."""
    optimizer = STEPPED[make]([leaf([12.0, 16.0]), leaf([48.0]), leaf([4.0])])
    weights, scaler = params(optimizer), started(OURS)
    if bad is not None:
        weights[bad].grad[0] = math.inf
    parts = zip(weights, (5.0, 12.0), strict=False)
    norms = [scaler.clip_grad_norm_(part, half(norm)).item() for part, norm in parts]
    assert norms == [math.inf if bad == 0 else 5.0, 12.0]
    finish(scaler, optimizer)
    assert scaler.step_was_skipped == (bad is not None)
    if bad is None:
        assert grads(optimizer)[2].item() == 1.0
        values = [value for weight in weights for value in weight.tolist()]
        assert values == [0.25, 0.0, -2.0, 0.5]
    else:
        assert f"['params'][{bad}]: 1 inf" in str(scaler.overflow_report())


def test_unscale_and_clip_after_parameters() -> None:
    for make in STEPPED.values():
        optimizer, scaler = make([leaf([12.0, 16.0]), leaf([48.0])]), started(OURS)
        scaler.clip_grad_norm_(params(optimizer)[0], math.inf)
        params(optimizer)[0].grad = grads(optimizer)[0].clone()  # a user's copy
        scaler.unscale_(optimizer)
        assert grads(optimizer)[1].item() == 12.0
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.unscale_(optimizer)
        assert scaler.clip_grad_norm_(optimizer, math.inf).item() == 13.0
        scaler.step(optimizer)
        assert params(optimizer)[1].item() == -5.0


@pytest.mark.parametrize("again", [False, True])
def test_gradients_that_come_after_a_clip_of_parameters_are_unscaled(again: bool) -> None:
    """Gradients that arrive after a clip of parameters are unscaled.

    A discriminator, for example, is clipped with all parameters and stepped before the generator.
    """
    first, second = (torch.ones(1, requires_grad=True) for _ in range(2))
    optimizer, scaler = sgd(second), started(OURS, 4.0)
    scaler.scale(first.sum()).backward()
    assert scaler.clip_grad_norm_([first, second], math.inf).item() == 1.0
    first.grad = None
    scaler.scale(3.0 * first.sum() + 4.0 * second.sum()).backward()
    if again:
        assert scaler.clip_grad_norm_([first, second], math.inf).item() == 5.0
    scaler.step(optimizer)
    assert grads(optimizer)[0].tolist() == [4.0]


@pytest.mark.parametrize("make", STEPPED)
def test_norm_of_parameters_above_the_limit_skips_after_a_second_clip(make: str) -> None:
    """A clip of some parameters above skip_above_norm skips the step of all."""
    optimizer = STEPPED[make]([leaf([40.0]), leaf([0.4])])
    scaler = started(OURS, skip_above_norm=1.0)
    scaler.clip_grad_norm_(params(optimizer)[:1], 0.5)
    scaler.clip_grad_norm_(optimizer, 0.5)
    finish(scaler, optimizer)
    assert [param.item() for param in params(optimizer)] == [1.0, 1.0]
    assert scaler.step_was_skipped


def test_parameters_are_not_kept() -> None:
    scaler, param = started(OURS), torch.ones(1, requires_grad=True)
    optimizer = sgd(param)
    scaler.scale(param.sum()).backward()
    scaler.clip_grad_norm_([param], 1.0)
    finish(scaler, optimizer)
    seen = weakref.ref(param)
    del param, optimizer
    gc.collect()
    assert seen() is None


# ---- overflow ----------------------------------------------------------------------------------


@pytest.mark.parametrize("allow_no_grads", [False, True])
def test_overflow_of_gradients_that_are_dropped_afterwards(allow_no_grads: bool) -> None:
    """An overflow seen by unscale_ counts after its gradients are dropped, as with torch's clip."""
    optimizer, scaler = sgd(leaf([math.inf])), started(OURS, allow_no_grads=allow_no_grads)
    scaler.unscale_(optimizer)
    optimizer.zero_grad()
    scaler.clip_grad_norm_(optimizer, 1.0)
    finish(scaler, optimizer)
    assert (scaler.step_was_skipped, scaler.get_scale()) == (True, 2.0)


def test_flags_that_a_trainer_has_added_stay() -> None:
    """Flags added by a trainer stay, such as another rank's flag without gradients here."""
    optimizer, scaler = sgd(leaf([12.0, 16.0])), started(OURS)
    scaler.unscale_(optimizer)
    found_infs = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    found_infs[torch.device("meta")] = torch.ones(())
    scaler.clip_grad_norm_(optimizer, 1.0)
    left = scaler._found_inf_per_device(optimizer)
    assert {device.type: flag.item() for device, flag in left.items()} == {"cpu": 0.0, "meta": 1.0}


def test_second_check_after_a_clip_keeps_the_overflow() -> None:
    """A clip leaves gradients scaled after an overflow, so the step must be skipped."""
    scaler, optimizer = started(OURS), sgd(leaf([1.0, math.inf]))
    scaler.clip_grad_norm_(optimizer, 1.0)
    grads(optimizer)[0].nan_to_num_(posinf=0.0)
    scaler._check_inf_per_device(optimizer)
    finish(scaler, optimizer)
    assert params(optimizer)[0].tolist() == [1.0, 1.0]
    assert scaler.step_was_skipped


@pytest.mark.parametrize("norm_type", [1.0, 2.0])
@pytest.mark.parametrize("make", STEPPED)
def test_second_clip_after_an_overflow(make: str, norm_type: float) -> None:
    """A clip of parameters leaves gradients scaled after an overflow: their norm is infinite."""
    optimizer, scaler = STEPPED[make]([leaf([4.0])]), started(OURS)
    scaler.clip_grad_norm_([leaf([math.inf]), *params(optimizer)], 1.0)
    with pytest.raises(RuntimeError, match="is non-finite"):
        scaler.clip_grad_norm_(optimizer, 1.0, norm_type, error_if_nonfinite=True)
    assert scaler.clip_grad_norm_(optimizer, 1.0, norm_type).item() == math.inf
    finish(scaler, optimizer)
    assert (params(optimizer)[0].item(), scaler.step_was_skipped) == (1.0, True)


def test_gradient_that_is_spoilt_after_unscale() -> None:
    """A gradient spoilt after unscale_ skips the step; torch would step with NaNs."""
    optimizer, scaler = sgd(leaf([12.0, 16.0])), started(OURS)
    scaler.unscale_(optimizer)
    grads(optimizer)[0][1] = math.nan
    scaler.clip_grad_norm_(optimizer, 1.0)
    with unwritten(params(optimizer)):
        scaler.step(optimizer)


@pytest.mark.parametrize("unscale_first", [False, True])
def test_error_if_nonfinite_changes_nothing(unscale_first: bool) -> None:
    optimizer, scaler = sgd(leaf([12.0, math.nan])), started(OURS)
    if unscale_first:
        scaler.unscale_(optimizer)
    state = scaler._per_optimizer_states[id(optimizer)]
    before = plain(state)
    with (
        unwritten(grads(optimizer)),
        pytest.raises(RuntimeError, match="is non-finite, so it cannot"),
    ):
        scaler.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
    assert plain(state) == before
    finish(scaler, optimizer)
    assert scaler.step_was_skipped


# ---- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", ["host", "amp_ext.optim"])
@pytest.mark.parametrize(
    ("calls", "text"),
    [
        (["unscale_", "clip", "clip"], r"clip_grad_norm_\(\) has already been called on this"),
        (["clip", "unscale_"], r"unscale_\(\) has already been called on this optimizer since"),
        (["clip", "step", "clip"], r"clip_grad_norm_\(\) is being called after step"),
    ],
    ids=str,
)
def test_stages(calls: list[str], text: str, make: str) -> None:
    scaler, optimizer = started(OURS), STEPPED[make]([leaf([12.0, 16.0])])
    clip = partial(scaler.clip_grad_norm_, max_norm=1.0)
    *before, last = (clip if name == "clip" else getattr(scaler, name) for name in calls)
    for call in before:
        call(optimizer)
    with unwritten(grads(optimizer)), pytest.raises(RuntimeError, match=text):
        last(optimizer)
    if last is clip and make != "host":
        with unwritten(grads(optimizer)), pytest.raises(RuntimeError, match=text):
            clip(params(optimizer))


def test_refused() -> None:
    optimizer, model = sgd(leaf([12.0, 16.0])), torch.nn.Sequential(torch.nn.Linear(1, 1))
    not_iterable, no_tensor = (
        (TypeError, "not iterable"),
        ((TypeError, AssertionError), "be torch.Tensor"),
    )
    for scaler, target, max_norm, (error, text) in (
        (OURS("cpu"), optimizer, 1.0, (AssertionError, "Attempted clip_grad_norm_ but _scale is")),
        (started(OURS), optimizer, -1.0, (ValueError, "not negative, got -1.0")),
        (started(OURS), optimizer, math.nan, (ValueError, "not negative, got nan")),
        (started(OURS), model[0], 1.0, not_iterable),
        (started(OURS), 1.0, 1.0, not_iterable),
        (started(OURS), model, 1.0, no_tensor),
        (started(OURS), [1.0], 1.0, no_tensor),
        (started(OURS), model.named_parameters(), 1.0, no_tensor),
    ):
        with unwritten(grads(optimizer)), pytest.raises(error, match=text):
            scaler.clip_grad_norm_(target, max_norm)


def test_a_norm_that_is_written_before_the_step() -> None:
    """A step that clips refuses a norm that has been written since clip_grad_norm_."""
    optimizer = amp_ext.optim.SGD([leaf([3.0])], lr=0.5)
    scaler = started(OURS)
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    norm.mul_(2)
    with pytest.raises(RuntimeError, match="has been written in place before step"):
        scaler.step(optimizer)


# ---- on a GPU ----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", twins.CUDA)
@pytest.mark.parametrize("clip", [twins.at_once, twins.after_unscale])
@pytest.mark.parametrize("bad", [False, True])
def test_several_devices_have_one_norm(device: str, bad: bool, clip: Clip) -> None:
    optimizer = sgd(leaf([12.0, 16.0]), leaf([math.inf if bad else 48.0], device=device))
    scaler = started(OURS, device=device)
    norm = clip(scaler, optimizer, 6.5)
    assert norm.device == scaler._scale.device
    flags = scaler._found_inf_per_device(optimizer).values()
    assert [flag.item() for flag in flags] == [float(bad)] * 2
    if not bad:
        assert norm.item() == 13.0
        torch.testing.assert_close(grads(optimizer)[0], torch.tensor([1.5, 2.0]))
        torch.testing.assert_close(grads(optimizer)[1].cpu(), torch.tensor([6.0]))


class Quantized(torch.nn.Parameter):
    """Have a function of its own for torch's functions, as quantized weights under LoRA have."""

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__torch_function__(*args, **kwargs)


def test_frozen_quantized_weights_are_passed_over() -> None:
    """Kernels read the gradients of the other parameters."""
    adapter = torch.nn.Parameter(torch.ones(2))
    adapter.grad = torch.full((2,), 4.0)
    groups = [{"params": [Quantized(torch.ones(2), requires_grad=False), adapter]}]
    flags, norm = _C.grad_pass(groups, "norm", torch.tensor(0.5), {})
    assert norm.item() == pytest.approx(8**0.5) and flags[torch.device("cpu")].item() == 0.0


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_shared_gradient_that_is_written_again(set_to_none: bool) -> None:
    """A gradient made after a step is scaled, although it is the same tensor as before."""
    w, a, b = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizers = [torch.optim.SGD([w, other], lr=0.25) for other in (a, b)]
    scaler = amp_ext.GradScaler("cpu", init_scale=1024.0)
    for optimizer, other in zip(optimizers, (a, b), strict=True):
        for each in optimizers:
            each.zero_grad(set_to_none=set_to_none)
        scaler.scale((w * other).sum()).backward()
        if other is a:
            scaler.clip_grad_norm_([w, a], 100.0)
        scaler.step(optimizer)
    assert w.tolist() == [0.5, 0.5]


def test_clip_in_inference_mode() -> None:
    optimizer = amp_ext.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    scaler = started(OURS, 8.0)
    optimizer.param_groups[0]["params"][0].grad = torch.full((1,), 16.0)
    with torch.inference_mode():
        assert scaler.clip_grad_norm_(optimizer, 1.0).item() == 2.0
