"""Test that GradScaler.clip_grad_norm_ equals unscale_ and torch.nn.utils.clip_grad_norm_."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import amp_ext.optim
from cases import FLOATS, LAYOUTS, assert_all_same, copies, unwritten, whole_and_view
from twins import (
    DEVICES,
    OURS,
    THEIRS,
    Clip,
    ScalerClass,
    StepsByScalars,
    Wrapped,
    after_unscale,
    at_once,
    by_parameters,
    clip_as_torch,
    every_way,
    found_inf,
    grads,
    leaf,
    params,
    plain,
    sgd,
    sparse_leaf,
    started,
    torchs_recipe,
    with_parameters,
)

CPU = torch.device("cpu")
optim = torch.optim
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: optim.Adam(p, lr=0.1, foreach=True),
}
STEP_CLIPS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd-fused": lambda p: optim.SGD(p, lr=0.5, fused=True),
    "scalars": lambda p: StepsByScalars(p, lr=0.5),
    "amp_ext.optim": lambda p: amp_ext.optim.SGD(p, lr=0.5),
}
"""Optimizers whose step unscales and clips, from a parameter of 1 by a learning rate of 0.5."""
STEPPED = {**STEP_CLIPS, "sgd": lambda p: optim.SGD(p, lr=0.5)}


def half(norm: float) -> float:
    """Return the max_norm for a clip coefficient of exactly 1/2."""
    return (torch.tensor(norm) + 1e-6).item() / 2


# ---- as torch ----------------------------------------------------------------------------------


class Training:
    """A linear loss: gradients are the same in both twins, whatever their parameters."""

    def __init__(
        self, scaler_class: ScalerClass, clip: Clip, optimizer: str, device: str, sizes: list[int]
    ) -> None:
        self.clip = clip
        weights = [torch.ones(size, device=device, requires_grad=True) for size in sizes]
        self.optimizer = OPTIMIZERS[optimizer](weights)
        self.scaler = scaler_class(device, init_scale=2.0**10, growth_interval=3)

    def step(self, slopes: list[Tensor], max_norm: float) -> float:
        """Train one step and return the norm."""
        self.optimizer.zero_grad()
        loss = sum(
            (w * slope).sum() for w, slope in zip(params(self.optimizer), slopes, strict=True)
        )
        self.scaler.scale(loss).backward()
        norm = self.clip(self.scaler, self.optimizer, max_norm)
        assert (norm.dtype, norm.shape) == (torch.float32, ())
        assert norm.device == self.scaler._scale.device
        self.found_inf = found_inf(self.scaler, self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return norm.item()

    def state(self) -> Any:
        """Return all that an overflow leaves alone."""
        scaler = self.scaler.get_scale(), self.scaler._get_growth_tracker()
        return plain([scaler, self.found_inf, params(self.optimizer), self.optimizer.state_dict()])


@with_parameters
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_trains_as_torch(optimizer: str, device: str, clip: Clip) -> None:
    """Training equals torch's bit for bit, as the norms are exact: 3, 4 and 12 have 13."""
    ours = Training(OURS, clip, optimizer, device, [2, 1, 3])
    theirs = Training(THEIRS, torchs_recipe, optimizer, device, [2, 1, 3])
    for index in range(20):
        values = [[3.0, -4.0], [12.0], [0.0, 0.0, math.inf if index in (5, 11) else 0.0]]
        slopes = [torch.tensor(v, device=device) * 2.0 ** (index % 7 - 3) for v in values]
        norms = [twin.step(slopes, 1 / 3 if index % 2 else 9.0) for twin in (ours, theirs)]
        assert ours.state() == theirs.state()
        assert ours.found_inf == float(index in (5, 11))
        if not ours.found_inf:
            assert norms[0] == norms[1] == 13 * 2.0 ** (index % 7 - 3)
            assert_all_same(grads(ours.optimizer), grads(theirs.optimizer))


@with_parameters
def test_any_dtype_and_layout(clip: Clip) -> None:
    """Gradients of any dtype and layout equal the ops' results, one after the other."""
    views = [whole_and_view(name, dtype, CPU)[1] for name in LAYOUTS for dtype in FLOATS[1:]]
    scaler, optimizer = started(OURS), sgd(*(leaf(view, view.dtype) for view in views))
    expected = copies(grads(optimizer))
    flag, inv_scale = torch.zeros(()), torch.tensor(0.25)
    if clip is after_unscale:
        torch.ops.amp_ext.unscale_(expected, flag, inv_scale)
        inv_scale = torch.tensor(1.0)
    norm = torch.ops.amp_ext.grad_norm(expected, flag, inv_scale)
    torch.ops.amp_ext.unscale_(expected, flag, inv_scale, norm=norm, max_norm=0.7)
    assert clip(scaler, optimizer, 0.7).item() == norm.item()
    assert_all_same(grads(optimizer), expected)


@with_parameters
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("max_norm", [half(13.0), 0.0, math.inf], ids=str)
@pytest.mark.parametrize("make", STEP_CLIPS)
def test_a_step_that_clips(make: str, max_norm: float, device: str, clip: Clip) -> None:
    """A step unscales by 4 and clips gradients of several dtypes: 3, 4 and 12 have a norm of 13."""
    optimizer = STEP_CLIPS[make](
        [
            leaf([12.0], torch.float32, device),
            leaf([-16.0], torch.float64, device),
            leaf([48.0], torch.float32 if device == "cuda" else torch.bfloat16, device),
        ]
    )
    scaler = started(OURS, device=device)
    assert clip(scaler, optimizer, max_norm).item() == 13.0
    scaler.step(optimizer)
    step = 0.5 * min(1.0, max_norm / 13.0)
    expected = [1.0 - step * grad for grad in (3.0, -4.0, 12.0)]
    assert [param.item() for param in params(optimizer)] == pytest.approx(expected, abs=2.0**-18)


@pytest.mark.parametrize("max_norm", [torch.tensor(half(5.0)), str(half(5.0))], ids=str)
@pytest.mark.parametrize("make", STEPPED)
def test_max_norm_is_what_float_takes(make: str, max_norm: Any) -> None:
    optimizer, scaler = STEPPED[make]([leaf([12.0, 16.0])]), started(OURS)
    scaler.clip_grad_norm_(optimizer, max_norm)
    scaler.step(optimizer)
    assert params(optimizer)[0].tolist() == [0.25, 0.0]


@pytest.mark.parametrize("make", STEP_CLIPS)
def test_gradients_are_only_read_where_the_step_clips(make: str) -> None:
    """If the step clips, gradients are only read; float16 ones are not unscaled in float16."""
    optimizer, scaler = STEP_CLIPS[make]([leaf([12.0, 16.0], torch.float16)]), started(OURS)
    with unwritten(grads(optimizer)):
        assert scaler.clip_grad_norm_(optimizer, 1.0).item() == 5.0


@pytest.mark.parametrize("preset", [None, 0.5])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_grad_scale_of_a_step_that_clips(unscale_first: bool, preset: float | None) -> None:
    """A step that clips gets a grad_scale with an exact coefficient of 1/2."""
    seen = []

    class Takes(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None) -> None:
            seen.append((self.grad_scale.item(), self.found_inf.item()))

    optimizer, scaler = Takes([leaf([12.0, 16.0])], lr=0.5), started(OURS)
    if preset:
        optimizer.grad_scale = preset
    clip = after_unscale if unscale_first else at_once
    clip(scaler, optimizer, half(5.0))
    scaler.step(optimizer)
    assert seen == [(2.0 * (1.0 if unscale_first else 4.0) * (preset or 1.0), 0.0)]


# ---- clipped parameters --------------------------------------------------------------------------


@with_parameters
def test_sparse_gradients_count_with_their_duplicates_added_up(clip: Clip) -> None:
    """Sparse gradients count with duplicates added up.

    4 and 5 + 7 are a norm of 4, and of 3 after unscaling by 4: torch cannot do this at all.
    """
    param = sparse_leaf(torch.float32, (16.0, 20.0, 28.0))
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


@every_way
def test_no_gradients(clip: Clip) -> None:
    scaler, optimizer = started(OURS), sgd(torch.ones(2))
    assert plain(clip(scaler, optimizer, 1.0)) == plain(torch.tensor(0.0))
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(optimizer)


@with_parameters
def test_tensor_subclass_gradients_take_torchs_way(clip: Clip) -> None:
    inner = torch.tensor([12.0, 16.0])
    param = Wrapped(torch.ones(2))
    param.grad = Wrapped(inner)
    optimizer, scaler = sgd(leaf([48.0])), started(OURS)
    optimizer.param_groups[0]["params"].append(param)
    norm = clip(scaler, optimizer, 6.5)
    assert norm.inner.item() == 13.0
    torch.testing.assert_close(inner, torch.tensor([1.5, 2.0]))
    torch.testing.assert_close(grads(optimizer)[0], torch.tensor([6.0]))
    if clip is not by_parameters:
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.clip_grad_norm_(optimizer, 1.0)


def test_disabled_scaler_clips_as_torch() -> None:
    theirs, ours = (sgd(leaf([[3.0, 4.0]], torch.float64), torch.ones(2)) for _ in range(2))
    norm = clip_as_torch(params(theirs), 1.0)
    scaler = OURS("cpu", enabled=False)
    assert plain(scaler.clip_grad_norm_(ours, 1.0)) == plain(norm)
    assert plain(grads(ours)) == plain(grads(theirs))
    scaler.clip_grad_norm_(ours, 1.0)
    grads(ours)[0].fill_(math.nan)
    with pytest.raises(RuntimeError, match="non-finite"):
        scaler.clip_grad_norm_(ours, 1.0, error_if_nonfinite=True)


# ---- norms of other orders -----------------------------------------------------------------------


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("norm_type", [math.inf, 1.0, 3, "inf"])
@pytest.mark.parametrize("make", ["sgd-fused", "amp_ext.optim"])
def test_norms_of_other_orders(make: str, norm_type: Any, alone: bool) -> None:
    """Norms of other orders are computed at once by torch's code, unscaled and clipped."""
    ours, theirs = STEP_CLIPS[make]([leaf([12.0, 16.0])]), sgd(leaf([3.0, 4.0]))
    scaler = started(OURS)
    norm = scaler.clip_grad_norm_(params(ours) if alone else ours, 2.0, norm_type)
    assert plain(norm) == plain(clip_as_torch(params(theirs), 2.0, norm_type=norm_type))
    assert plain(grads(ours)) == plain(grads(theirs))
    scaler.step(ours)
    scaler.update()
    assert plain(params(ours)[0]) == plain(1.0 - 0.5 * grads(theirs)[0])


# ---- parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("make", STEPPED)
def test_parameters_of_several_optimizers_have_one_norm(make: str, bad: bool) -> None:
    """Parameters of several optimizers have one norm, and no optimizer steps after an overflow.

    3, 4 and 12 have a norm of 13.
    """
    first = STEPPED[make]([leaf([12.0, 16.0])])
    second = STEPPED[make]([leaf([math.inf if bad else 48.0]), torch.ones(1)])
    scaler = started(OURS)
    if make == "sgd":
        scaler.unscale_(second)
    norm = scaler.clip_grad_norm_([*params(first), *params(second)], half(13.0))
    assert math.isinf(norm) if bad else norm.item() == 13.0
    for optimizer in (first, second):
        scaler.step(optimizer)
    after = [param.tolist() for param in (*params(first), *params(second))]
    assert scaler.get_scale() == 4.0
    scaler.update()
    assert scaler.step_was_skipped == bad
    assert scaler.get_scale() == (2.0 if bad else 4.0)
    stepped = [[0.25, 0.0], [-2.0], [1.0]]
    assert after == ([[1.0, 1.0], [1.0], [1.0]] if bad else stepped)


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
    scaler.step(optimizer)
    scaler.update()
    assert scaler.step_was_skipped == (bad is not None)
    if bad is None:
        assert grads(optimizer)[2].item() == 1.0
        values = [value for weight in weights for value in weight.tolist()]
        assert values == [0.25, 0.0, -2.0, 0.5]
    else:
        assert f"['params'][{bad}]: 1 inf" in str(scaler.overflow_report())


@pytest.mark.parametrize("make", STEPPED)
def test_unscale_and_clip_after_parameters(make: str) -> None:
    optimizer = STEPPED[make]([leaf([12.0, 16.0]), leaf([48.0])])
    scaler = started(OURS)
    scaler.clip_grad_norm_(params(optimizer)[0], math.inf)
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


@pytest.mark.parametrize("is_finite", [True, False])
def test_a_clip_of_parameters_skips_a_step_unscaled_before(is_finite: bool) -> None:
    """A norm that is infinite or above the limit skips the steps of all optimizers in it."""
    first, second = sgd(leaf([12.0, 16.0])), sgd(leaf([48.0]))
    scaler = started(OURS, skip_above_norm=12.5)
    if not is_finite:
        grads(second)[0].fill_(math.inf)
    scaler.unscale_(first)
    norm = scaler.clip_grad_norm_([*params(first), *params(second)], 1.0)
    assert norm.item() == (13.0 if is_finite else math.inf)
    scaler.step(first)
    assert params(first)[0].tolist() == [1.0, 1.0]


def test_parameters_are_not_kept() -> None:
    scaler, param = started(OURS), torch.ones(1, requires_grad=True)
    optimizer = sgd(param)
    scaler.scale(param.sum()).backward()
    scaler.clip_grad_norm_([param], 1.0)
    scaler.step(optimizer)
    scaler.update()
    seen = weakref.ref(param)
    del param, optimizer
    gc.collect()
    assert seen() is None


def test_refused_parameters() -> None:
    optimizer = STEP_CLIPS["amp_ext.optim"]([leaf([12.0, 16.0])])
    scaler, model = started(OURS), torch.nn.Sequential(torch.nn.Linear(1, 1))
    with unwritten(grads(optimizer)):
        for wrong in (model[0], model, 1.0, [1.0], model.named_parameters()):
            with pytest.raises((TypeError, AssertionError), match=r"not iterable|be torch\.Tensor"):
                scaler.clip_grad_norm_(wrong, 1.0)
        scaler.clip_grad_norm_(optimizer, 1.0)
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.clip_grad_norm_(params(optimizer), 1.0)
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match=r"called after step\(\)"):
            scaler.clip_grad_norm_(params(optimizer), 1.0)
    other, scaler = sgd(leaf([math.inf])), started(OURS)
    with unwritten(grads(other)), pytest.raises(RuntimeError, match="non-finite"):
        scaler.clip_grad_norm_(params(other), 1.0, error_if_nonfinite=True)
    scaler.step(other)
    scaler.update()
    assert scaler.step_was_skipped


# ---- on a GPU ----------------------------------------------------------------------------------

on_gpu = pytest.mark.parametrize("device", [device for device in DEVICES if device == "cuda"])


@on_gpu
@every_way
def test_no_host_synchronisation(device: str, clip: Clip) -> None:
    optimizer, scaler = sgd(leaf([12.0, 16.0], device=device)), started(OURS, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        clip(scaler, optimizer, 1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_gpu
@every_way
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
