"""Test the division of work in GradScaler.step: unscaling, clipping and skipping."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import amp_ext.optim
from amp_ext.optim.lr_scheduler import SkipAware
from amp_ext.scaler.optimizers import Handover, handover_of
from cases import unwritten
from twins import OURS, THEIRS, ScalerClass, grads, leaf, params, started, state_of

every_scaler = pytest.mark.parametrize("scaler_class", [OURS, THEIRS], ids=["ours", "torch's"])

# ---- steps that other code watches ---------------------------------------------------------------

Look = Callable[[], None]


def instance(optimizer: Any, look: Look) -> None:
    inner = optimizer.step
    optimizer.step = lambda *args, **kwargs: (look(), inner(*args, **kwargs))


def wraps(optimizer: Any, look: Look) -> None:
    """functools.wraps copies the mark that a scheduler has set."""
    StepLR(optimizer, 1)
    inner = optimizer.step

    @functools.wraps(inner)
    def step(*args: Any, **kwargs: Any) -> Any:
        look()
        return inner(*args, **kwargs)

    optimizer.step = step


def below_a_scheduler(optimizer: Any, look: Look) -> None:
    inner = optimizer.step
    optimizer.step = MethodType(lambda self, *args: (look(), inner(*args)), optimizer)
    StepLR(optimizer, 1)


def subclass(optimizer: Any, look: Look) -> None:
    class Watching(type(optimizer)):
        def step(self, *args: Any) -> Any:
            look()
            return super().step(*args)

    optimizer.__class__ = Watching


WATCHES: dict[str, Callable[[Any, Look], Any]] = {
    "instance": instance,
    "wraps": wraps,
    "below a scheduler": below_a_scheduler,
    "subclass": subclass,
    "pre-hook": lambda optimizer, look: optimizer.register_step_pre_hook(lambda *_: look()),
    "post-hook": lambda optimizer, look: optimizer.register_step_post_hook(lambda *_: look()),
    "global pre-hook": lambda _, look: register_optimizer_step_pre_hook(lambda *_: look()),
    "global post-hook": lambda _, look: register_optimizer_step_post_hook(lambda *_: look()),
}


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("watch", WATCHES.values(), ids=WATCHES)
def test_a_watched_step_sees_unscaled_gradients(watch: Callable[..., Any], clips: bool) -> None:
    """A watched step is not called after an overflow."""
    optimizer, scaler = amp_ext.optim.SGD([leaf([8.0])], lr=0.5, fused=clips), started(OURS)
    seen: list[float] = []
    handle = watch(optimizer, lambda: seen.append(grads(optimizer)[0].item()))
    try:
        for value in (8.0, math.inf):
            grads(optimizer)[0].fill_(value)
            if clips:
                scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
    finally:
        if handle is not None:
            handle.remove()
    assert seen == [pytest.approx(1.0 if clips else 2.0, rel=1e-5)]
    assert params(optimizer)[0].item() == pytest.approx(0.5 if clips else 0.0, abs=1e-5)
    assert scaler.step_was_skipped


def test_schedulers_do_not_watch() -> None:
    """Schedulers wrap and hook steps; the steps still unscale by themselves."""
    optimizer, scaler = amp_ext.optim.SGD([leaf([4.0])], lr=0.5), started(OURS)
    SkipAware(StepLR(optimizer, 1), scaler)
    assert handover_of(optimizer) is Handover.KERNELS
    with unwritten(grads(optimizer)):
        scaler.step(optimizer)
    assert params(optimizer)[0].tolist() == [0.5]


def test_a_step_wrapped_after_the_clip_is_refused() -> None:
    """A step wrapped after the clip is refused: its wrapper would see scaled gradients."""
    optimizer, scaler = amp_ext.optim.SGD([leaf([8.0])], lr=0.5), started(OURS)
    scaler.clip_grad_norm_(optimizer, 1.0)
    step = optimizer.step
    instance(optimizer, lambda: None)
    with pytest.raises(RuntimeError, match=r"wrapped or hooked since\. Wrap it before clip_grad"):
        scaler.step(optimizer)
    assert params(optimizer)[0].tolist() == [1.0]
    optimizer.step = step
    scaler.step(optimizer)
    assert params(optimizer)[0].item() == pytest.approx(0.5, abs=1e-5)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("way", ["subclass", "instance"])
@pytest.mark.parametrize(
    "method", ["unscale_", "_unscale_grads_", "_check_inf_per_device", "_maybe_opt_step"]
)
def test_overridden_methods_of_the_scaler_are_called(method: str, way: str, clips: bool) -> None:
    """step() and clip_grad_norm_() of an optimizer of amp_ext.optim use a subclass's methods."""
    calls = []

    def own(scaler: Any, *args: Any) -> Any:
        calls.append(method)
        return getattr(OURS, method)(scaler, *args)

    cls = type("GradScaler", (OURS,), {method: own} if way == "subclass" else {})
    optimizer, scaler = amp_ext.optim.SGD([leaf([8.0])], lr=0.5), started(cls)
    if way == "instance":
        setattr(scaler, method, lambda *args: own(scaler, *args))
    if clips:
        assert scaler.clip_grad_norm_(optimizer, math.inf).item() == 2.0
    scaler.step(optimizer)
    assert calls == ([] if clips and method == "_check_inf_per_device" else [method])
    assert params(optimizer)[0].tolist() == [0.0]


# ---- fused steps of torch's ----------------------------------------------------------------------


def expanded() -> list[Tensor]:
    param = torch.ones(64, 64)
    param.grad = torch.tensor(4.0).expand(64, 64)
    return [param]


def shared() -> list[Tensor]:
    first, second = leaf([4.0, 8.0]), leaf([4.0, 8.0])
    second.grad = first.grad
    return [first, second]


@pytest.mark.parametrize("clips", [False, True])
def test_a_fused_step_needs_gradients_that_can_be_written(clips: bool) -> None:
    """A gradient with overlapping elements is an error, and nothing is written."""
    for make, text in ((expanded, "single memory location"), (shared, r"grads\[1\] overlap")):
        optimizer, scaler = torch.optim.AdamW(make(), fused=True), started(OURS)
        with pytest.raises(RuntimeError, match=text):
            (scaler.clip_grad_norm_(optimizer, 1.0) if clips else scaler.step(optimizer))
        assert all((param == 1).all() for param in params(optimizer))
        assert not optimizer.state


@pytest.mark.parametrize("clips", [False, True])
def test_kernels_read_a_gradient_whose_elements_overlap(clips: bool) -> None:
    optimizer, scaler = amp_ext.optim.SGD(expanded(), lr=0.5), started(OURS)
    if clips:
        scaler.clip_grad_norm_(optimizer, 1e4)
    scaler.step(optimizer)
    assert (params(optimizer)[0] == 0.5).all()


@every_scaler
@pytest.mark.parametrize("unscale_first", [False, True])
def test_fused_with_an_option_that_kernels_do_not_serve(
    unscale_first: bool, scaler_class: ScalerClass, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's fused step receives its scale and flag, and the host does not decide."""
    for each in (OURS, THEIRS):
        monkeypatch.setattr(each, "_maybe_opt_step", lambda *_: pytest.fail("the host decides"))
    states = []
    for cls, scaler in (
        (amp_ext.optim.AdamW, started(scaler_class)),
        (torch.optim.AdamW, started(THEIRS)),
    ):
        betas = torch.tensor(0.9), torch.tensor(0.999)
        optimizer = cls([leaf([4.0, 8.0])], betas=betas, fused=True)
        for value in (8.0, math.inf, 2.0):
            grads(optimizer)[0].copy_(torch.tensor([4.0, value]))
            if unscale_first:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            states.append(state_of(scaler, [optimizer]))
    assert states[:3] == states[3:]


@every_scaler
@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("preset", [2.0, torch.tensor(2.0), torch.tensor([2.0])], ids=str)
def test_a_grad_scale_that_users_have_set(
    preset: Any, unscale_first: bool, scaler_class: ScalerClass
) -> None:
    """Steps of amp_ext.optim divide gradients by grad_scale, under either scaler, ours once."""
    optimizer, scaler = amp_ext.optim.SGD([leaf([8.0])], lr=0.5), started(scaler_class)
    optimizer.grad_scale = preset
    for expected in (0.5, -0.5) if scaler_class is OURS else (0.5,):
        grads(optimizer)[0].fill_(8.0)
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert params(optimizer)[0].tolist() == [expected]


def test_a_found_inf_that_users_have_set() -> None:
    """A found_inf set by users skips a step without a scaler, as with torch's fused step."""
    for cls in (amp_ext.optim.SGD, torch.optim.SGD):
        optimizer = cls([leaf([8.0])], lr=0.5, fused=True)
        optimizer.found_inf = torch.tensor(1.0)
        optimizer.step()
        assert params(optimizer)[0].tolist() == [1.0]
