"""Test GradScaler.step: who unscales, clips and skips, amp protocols, closures, devices."""

import functools
import math
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import amp_ext.optim
import twins
from fake_cuda import recorder
from twins import OURS, THEIRS, ScalerClass, finish, grads, leaf, params, plain, sgd, started

every_scaler = pytest.mark.parametrize("scaler_class", [OURS, THEIRS], ids=["ours", "torch's"])


class TakesAttributes(torch.optim.SGD):
    """An optimizer that unscales and skips by grad_scale and found_inf as attributes."""

    _step_supports_amp_scaling = True

    def step(self) -> Any:
        return plain([self.grad_scale, self.found_inf]), plain(grads(self))


class TakesKeyword(torch.optim.SGD):
    """An optimizer of the deprecated protocol, with the scaler as an argument."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
        grad_scaler.unscale_(self)
        found_inf = grad_scaler._found_inf_per_device(self)
        assert not hasattr(self, "grad_scale") and not hasattr(self, "found_inf")
        return plain([found_inf, grads(self), grad_scaler._get_scale_async()])


def optimizer_of(cls: type[torch.optim.SGD], grad: Any = (4.0, 8.0)) -> Any:
    return cls([leaf(grad)], lr=0.5)


@pytest.mark.parametrize("grad", [(4.0, 8.0), (4.0, math.inf)], ids=str)
@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("preset", [None, 0.25, torch.tensor(0.25), torch.tensor([0.25])], ids=str)
def test_grad_scale_and_found_inf(preset: Any, unscale_first: bool, grad: Any) -> None:
    """A grad_scale that is already set is multiplied in, or left alone after unscale_."""

    def script(scaler_class: ScalerClass) -> Any:
        optimizer = optimizer_of(TakesAttributes, grad)
        other, scaler = sgd(leaf(4.0)), started(scaler_class)
        if preset is not None:
            optimizer.grad_scale = preset
        if unscale_first:
            scaler.unscale_(optimizer)
        handed = scaler.step(optimizer)
        scaler.step(other)
        before = twins.state_of(scaler, [optimizer, other])
        scaler.update()
        left = hasattr(optimizer, "grad_scale"), hasattr(optimizer, "found_inf")
        return handed, left, before, scaler.get_scale()

    assert twins.same_outcome(script)[0] == "returned"


def test_grad_scale_of_a_step_that_clips() -> None:
    """A step that clips gets a preset grad_scale times an exact coefficient of 1/2."""
    optimizer, scaler = optimizer_of(TakesAttributes, (12.0, 16.0)), started(OURS)
    optimizer.grad_scale = 0.25
    scaler.clip_grad_norm_(optimizer, (torch.tensor(5.0) + 1e-6) / 2)
    (handed, _) = scaler.step(optimizer)
    assert handed == plain([torch.tensor(2.0), torch.tensor(0.0)])


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_gradients_that_come_too_late(fused: bool) -> None:
    """A step fails on gradients that arrive after unscale_, as in torch: they are unchecked."""
    for scaler_class in (THEIRS, OURS):
        param = torch.ones(2)
        optimizer, scaler = torch.optim.Adam([param], fused=fused), started(scaler_class)
        scaler.unscale_(optimizer)
        param.grad = torch.tensor([4.0, 8.0])
        with pytest.raises((AssertionError, AttributeError)):
            scaler.step(optimizer)
        assert param.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("preset", "divisor"), [(0.5, 2.0), (None, 4.0)])
def test_failing_step_can_be_repeated(
    preset: float | None, divisor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception in the optimizer's step leaves stage and attributes as they were."""
    optimizer, scaler = optimizer_of(TakesAttributes), started(OURS)
    if preset is not None:
        optimizer.grad_scale = preset
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(TakesAttributes, "step", lambda self: 1 / 0)
        scaler.step(optimizer)
    assert not hasattr(optimizer, "found_inf")
    assert getattr(optimizer, "grad_scale", None) == preset
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
    assert scaler.step(optimizer)[0] == plain([torch.tensor(divisor), torch.tensor(0.0)])
    assert not hasattr(optimizer, "grad_scale")


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("has_scheduler", [False, True])
@pytest.mark.parametrize("cls", [TakesAttributes, TakesKeyword])
def test_protocols(cls: type[torch.optim.SGD], has_scheduler: bool) -> None:
    """Optimizers take attributes or drive the scaler, below a scheduler's wrapper too."""

    def script(scaler_class: ScalerClass) -> Any:
        optimizer, scaler = optimizer_of(cls, (4.0, math.nan)), started(scaler_class)
        if has_scheduler:
            StepLR(optimizer, 1)
        seen = [scaler.step(optimizer), twins.state_of(scaler, [optimizer])]
        scaler.update()
        return seen, scaler.get_scale()

    assert twins.same_outcome(script)[0] == "returned"


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("make", [torch.optim.SGD, amp_ext.optim.SGD])
def test_positional_closure(make: Any, fused: bool) -> None:
    """A closure by position is called; Accelerate passes None there."""
    for closure, result in ((None, None), (lambda: 7.0, 7.0)):
        optimizer = make([leaf([4.0, 8.0])], lr=0.5, fused=fused)
        assert started(OURS).step(optimizer, closure) == result
        assert params(optimizer)[0].tolist() == [0.5, 0.0]


@pytest.mark.parametrize(("value", "results"), [(8.0, (0.0, 2.0)), (math.inf, (1.0, math.inf))])
def test_a_closure_makes_gradients(value: float, results: tuple[float, float]) -> None:
    """A closure's gradient is not divided by the scale, and an overflow leaves it uncalled."""
    optimizer = amp_ext.optim.SGD([leaf(value)], lr=0.5)
    (param,) = params(optimizer)
    started(OURS).step(optimizer, lambda: param.grad.fill_(2.0))
    assert (param.item(), param.grad.item()) == results


def test_an_optimizer_for_each_of_many_parameters() -> None:
    """The scale takes the flags of more optimizers than one launch does."""
    optimizers = [sgd(leaf(4.0)) for _ in range(449)]
    optimizers.append(sgd(leaf(math.inf)))
    scaler = started(OURS)
    finish(scaler, *optimizers)
    assert scaler.get_scale() == 2.0


def test_a_fused_step_divides_what_its_closure_makes() -> None:
    results = []
    for package in (torch.optim, amp_ext.optim):
        (param,) = params(optimizer := package.SGD([leaf(4.0)], lr=0.5, fused=True))
        started(OURS).step(optimizer, lambda grad=param.grad: grad.fill_(8.0))
        results.append(param.item())
    assert results[0] == results[1]


@pytest.mark.parametrize("flags", [(0.0, 0.0), (0.0, 1.0), (1.0, 1.0)], ids=str)
def test_found_inf_of_several_devices_is_never_more_than_one(flags: tuple[float, float]) -> None:
    """found_inf of several devices is at most 1: torch's fused optimizers skip at 1 alone."""
    optimizer, scaler = optimizer_of(TakesAttributes), started(OURS)
    scaler.unscale_(optimizer)
    devices = (torch.device("cpu"), torch.device("cpu", 0))
    found_infs = dict(zip(devices, map(torch.tensor, flags), strict=True))
    scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found_infs
    (_, found_inf), _ = scaler.step(optimizer)
    assert found_inf == plain(torch.tensor(max(flags)))
    scaler.update()
    assert scaler.get_scale() == (2.0 if any(flags) else 4.0)


def test_fused_step_with_momentum_may_be_skipped() -> None:
    """A skip keeps momentum; torch would read uninitialised memory after a skipped first step."""

    def trained(values: list[float]) -> Tensor:
        param = torch.ones(4)
        optimizer = torch.optim.SGD([param], lr=0.5, momentum=0.9, fused=True)
        scaler = started(OURS, growth_factor=2.0, backoff_factor=0.5)
        for value in values:
            param.grad = torch.full((4,), value * scaler.get_scale())
            finish(scaler, optimizer)
        return param

    # Momentum starts as a copy of the gradient, or as zero times 0.9 plus the gradient.
    for values in ([math.inf, 1.0, 2.0], [1.0, math.inf, 2.0]):
        assert torch.equal(trained(values), trained([1.0, 2.0]))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("then", ["checkpoint", "kernels", "torch"])
def test_first_update_after_a_skipped_step(then: str, fused: bool) -> None:
    """The first update is not dampened, whoever makes it after kernels have skipped a step.

    torch's code makes steps with a float64 gradient, here of a parameter without momentum.
    """

    def step(optimizer: Any, value: float, by_torch: bool) -> None:
        groups = optimizer.param_groups
        groups[0]["params"][0].grad = torch.full((2,), value)
        groups[1]["params"][0].grad = torch.ones(1, dtype=torch.float64) if by_torch else None
        finish(started(OURS, 1.0), optimizer)

    def made(cls: Any) -> Any:
        options = {"lr": 0.5, "dampening": 0.5, "fused": fused}
        other = {"params": [torch.ones(1, dtype=torch.float64)], "momentum": 0.0}
        return cls([{"params": [torch.ones(2)], "momentum": 0.5}, other], **options)

    optimizer = made(amp_ext.optim.SGD)
    step(optimizer, math.inf, False)
    if then == "checkpoint":
        source, optimizer = optimizer, made(torch.optim.SGD)
        optimizer.load_state_dict(source.state_dict())
    step(optimizer, 2.0, then == "torch")
    assert params(optimizer)[0].tolist() == [0.0, 0.0]
    step(optimizer, 4.0, False)
    assert params(optimizer)[0].tolist() == [-1.5, -1.5]  # by a momentum of 0.5 * 2 + 0.5 * 4


@pytest.mark.parametrize("replaces", [False, True])
def test_a_flag_that_is_written_after_the_check(replaces: bool) -> None:
    """A flag written after the check is honoured: trainers write it to skip on all ranks."""
    optimizer, scaler = sgd(leaf([4.0])), started(OURS)
    scaler.unscale_(optimizer)
    found_infs = scaler._found_inf_per_device(optimizer)
    [(device, found_inf)] = found_infs.items()
    if replaces:
        found_infs[device] = torch.ones_like(found_inf)
    else:
        found_inf.data.fill_(1.0)
    assert scaler.step(optimizer) is None
    scaler.update()
    assert (params(optimizer)[0].tolist(), scaler.step_was_skipped) == ([1.0], True)


@pytest.mark.fake_cuda
@pytest.mark.parametrize("value", [4.0, math.inf], ids=str)
def test_what_the_host_has_decided_it_knows_cuda(value: float) -> None:
    scaler, optimizer = started(OURS, device="cuda"), sgd(leaf([value], device="cuda"))
    finish(scaler, optimizer)
    with recorder.recorded() as calls:
        assert scaler.step_was_skipped == math.isinf(value)
    assert not calls.all


def test_a_wrapper_is_not_handed_what_its_optimizer_reads() -> None:
    class Wrapper:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def __getattr__(self, name: str) -> Any:
            return getattr(self.optimizer, name)

    scaler = started(OURS)
    for clips in (False, True):
        optimizer = amp_ext.optim.SGD([leaf([4.0])], lr=0.5)
        wrapper: Any = Wrapper(optimizer)
        if clips:
            scaler.clip_grad_norm_(wrapper, 2.0)
        finish(scaler, wrapper)
        assert params(optimizer)[0].tolist() == [0.5]


def test_an_attempt_that_failed_leaves_no_overflow() -> None:
    """A failed or abandoned attempt leaves no overflow: the next step begins at found_inf 0."""
    scaler, bad = started(OURS), twins.StepsByScalars([leaf([math.inf])], lr=0.5)
    scaler.unscale_(bad)
    scaler._per_optimizer_states.clear()
    good = twins.StepsByScalars([leaf([4.0])], lr=0.5)
    finish(scaler, good)
    assert (scaler.get_scale(), scaler.step_was_skipped) == (4.0, False)
    assert good.seen.found_inf.item() == 0.0  # its memory serves every step
    assert good._step_scalars is None
    scaler.step(good)
    assert params(good)[0].tolist() == [0.0]


@pytest.mark.parametrize("how", ["_scale", "_scale.data", "NumPy"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_scale_that_was_replaced_is_used(shape: tuple[int, ...], how: str) -> None:
    """A scale that users replace is used; test_grad_scaler_machine.py has other ways to set it.

    NumPy writes it without a new version, as torch.distributed does.
    """
    scaler, optimizer = started(OURS, 4.0, growth_interval=1), sgd(leaf([4.0]))
    owner = scaler if how == "_scale" else scaler._scale
    if how == "NumPy":
        owner.numpy().fill(2.0)
    else:
        setattr(owner, how.removeprefix("_scale."), torch.full(shape, 2.0))
    for grad in (2.0, 0.5):  # of the scale that was set, and of the one after
        finish(scaler, optimizer)
        assert grads(optimizer)[0].tolist() == [grad]


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_that_are_repaired_after_unscaling(fused: bool) -> None:
    """A second check starts from a new flag, and the step is made."""

    def script(scaler_class: ScalerClass) -> Any:
        scaler, param = started(scaler_class), leaf([4.0, math.inf])
        optimizer = torch.optim.AdamW([param], fused=fused)
        scaler.unscale_(optimizer)
        param.grad.nan_to_num_(posinf=0.0)
        seen = [*scaler._check_inf_per_device(optimizer).values()], finish(scaler, optimizer)
        return seen, param, scaler.get_scale()

    assert twins.same_outcome(script)[1][2] == 4.0


def test_operators_for_the_scalars_of_a_step() -> None:
    """The last update leaves found_inf, and on a CPU each step renews the factor once."""
    scaler = started(OURS)
    for fused in (False, True):
        optimizer = torch.optim.SGD([leaf([4.0])], lr=0.5, fused=fused)
        with torch.profiler.profile() as profile:
            finish(scaler, optimizer)
        counts = {event.key: event.count for event in profile.key_averages()}
        assert counts["aten::reciprocal"] == 1
        assert not counts.keys() & {"aten::zeros", "aten::zero_", "aten::fill_", "aten::copy_"}


@pytest.mark.fake_cuda
@pytest.mark.parametrize("is_distributed", [False, True])
def test_launches_of_a_step_cuda(is_distributed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is three launches. Among several processes, one more renews the factor."""
    monkeypatch.setattr("amp_ext.scaler.loss_scale.is_distributed", lambda: is_distributed)
    optimizer = amp_ext.optim.SGD([leaf([4.0], device="cuda")], lr=0.5)
    scaler = started(OURS, device="cuda")
    finish(scaler, optimizer)  # also verifies the kernels
    with recorder.recorded() as calls:
        finish(scaler, optimizer)
    assert len(calls.of("launch")) == 3 + is_distributed, calls.all


@pytest.mark.parametrize(("value", "scale"), [(math.inf, 2.0), (8.0, 4.0)], ids=["inf", "norm"])
def test_update_that_raises_counts_nothing(value: float, scale: float) -> None:
    """Once corrected, the same update counts one skipped step."""
    scaler = started(OURS, max_consecutive_skips=3, skip_above_norm=1.0)
    optimizer = sgd(leaf([value]))
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    with pytest.raises(AssertionError):
        scaler.update(torch.ones(2))
    scaler.set_backoff_factor("x")
    with pytest.raises(RuntimeError, match="backoff_factor"):
        scaler.update()
    scaler.set_backoff_factor(0.5)
    scaler.update()
    assert scaler._numbers.consecutive_skips.item() == 1
    assert (scaler.get_skipped_steps(), scaler.get_scale()) == (1, scale)


# ---- steps that other code watches ---------------------------------------------------------------

HOOKS: dict[str, Callable[..., Any]] = {
    "pre-hook": torch.optim.Optimizer.register_step_pre_hook,
    "post-hook": torch.optim.Optimizer.register_step_post_hook,
    "global pre-hook": lambda _, hook: register_optimizer_step_pre_hook(hook),
    "global post-hook": lambda _, hook: register_optimizer_step_post_hook(hook),
}


def replace_step(optimizer: Any, way: str, look: Callable[[], Any]) -> None:
    """Let code see each step of an optimizer."""
    if way == "wraps a scheduler's":
        StepLR(optimizer, 1)
    inner = optimizer.step

    def step(self: Any, *args: Any) -> Any:
        look()
        return inner(*args)

    if way == "subclass":
        optimizer.__class__ = type("Watching", (type(optimizer),), {"step": step})
    elif way == "wraps a scheduler's":  # and copies its mark
        optimizer.step = functools.wraps(inner)(functools.partial(step, optimizer))
    else:
        optimizer.step = MethodType(step, optimizer)
    if way == "below a scheduler":
        StepLR(optimizer, 1)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize(
    "way", ["instance", "wraps a scheduler's", "below a scheduler", "subclass", *HOOKS]
)
def test_a_watched_step_sees_unscaled_gradients(way: str, clips: bool) -> None:
    """A watched step is not called after an overflow."""
    optimizer, scaler = amp_ext.optim.SGD([leaf([8.0])], lr=0.5, fused=clips), started(OURS)
    seen: list[float] = []

    def look(*_: Any) -> None:
        seen.append(grads(optimizer)[0].item())

    handle = HOOKS[way](optimizer, look) if way in HOOKS else replace_step(optimizer, way, look)
    try:
        for value in (8.0, math.inf):
            grads(optimizer)[0].fill_(value)
            if clips:
                scaler.clip_grad_norm_(optimizer, 1.0)
            finish(scaler, optimizer)
    finally:
        if handle is not None:
            handle.remove()
    assert seen == [pytest.approx(1.0 if clips else 2.0, rel=1e-5)]
    assert params(optimizer)[0].item() == pytest.approx(0.5 if clips else 0.0, abs=1e-5)
    assert scaler.step_was_skipped


def test_a_step_watched_after_the_clip_is_refused() -> None:
    """A wrapper after the clip would see scaled gradients, and a closure's would be clipped."""
    optimizer, scaler = amp_ext.optim.SGD([leaf([8.0])], lr=0.5), started(OURS)
    scaler.clip_grad_norm_(optimizer, 1.0)
    with pytest.raises(RuntimeError, match=r"no closure\. Clip parameters instead"):
        scaler.step(optimizer, lambda: pytest.fail("the closure was called"))
    step = optimizer.step
    replace_step(optimizer, "instance", lambda: None)
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


def expanded() -> Tensor:
    param = torch.ones(64, 64)
    param.grad = torch.tensor(4.0).expand(64, 64)
    return param


@pytest.mark.parametrize("clips", [False, True])
def test_a_fused_step_needs_gradients_that_can_be_written(clips: bool) -> None:
    """A gradient with overlapping elements is an error, and nothing is written."""
    first, second = leaf([4.0, 8.0]), torch.ones(2)
    second.grad = first.grad
    for given, text in (
        ([expanded()], "single memory location"),
        ([first, second], r"grads\[1\] overlap"),
    ):
        optimizer, scaler = torch.optim.AdamW(given, fused=True), started(OURS)
        with pytest.raises(RuntimeError, match=text):
            (scaler.clip_grad_norm_(optimizer, 1.0) if clips else scaler.step(optimizer))
        assert all((param == 1).all() for param in given)
        assert not optimizer.state


@pytest.mark.parametrize("clips", [False, True])
def test_kernels_read_a_gradient_whose_elements_overlap(clips: bool) -> None:
    optimizer, scaler = amp_ext.optim.SGD([expanded()], lr=0.5), started(OURS)
    if clips:
        scaler.clip_grad_norm_(optimizer, 1e4)
    scaler.step(optimizer)
    assert (params(optimizer)[0] == 0.5).all()


FUSED = {"fused": True}


@pytest.mark.parametrize("way", ["step", "unscale", "clip"])
@every_scaler
@pytest.mark.parametrize(
    "options", [{}, FUSED, FUSED | {"weight_decay": torch.tensor(0.5)}], ids=str
)
def test_steps_that_kernels_do_not_serve(
    options: dict[str, Any], scaler_class: ScalerClass, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps beyond the kernels alternate with theirs: one gradient is float64, once infinite.

    torch's fused step then receives its scale and flag, and the host does not decide.
    """
    is_host = "fused" not in options or (scaler_class is THEIRS and options == FUSED)
    for each in () if is_host else (OURS, THEIRS):
        monkeypatch.setattr(each, "_maybe_opt_step", lambda *_: pytest.fail("the host decides"))
    outcomes = []
    for cls, make in ((scaler_class, amp_ext.optim.SGD), (THEIRS, torch.optim.SGD)):
        single, double = leaf([1.0, 2.0]), leaf([1.0], torch.float64)
        optimizer, scaler = make([single, double], lr=0.5, **options), started(cls)
        for number in (None, 8.0, math.inf, None, 8.0):
            single.grad = torch.tensor([4.0, 16.0])
            double.grad = None if number is None else torch.full_like(double, number)
            if way == "unscale":
                scaler.unscale_(optimizer)
            elif way == "clip":
                (twins.at_once if cls is OURS else twins.torchs_recipe)(scaler, optimizer, 1000.0)
            finish(scaler, optimizer)
            outcomes.append((single.tolist(), double.tolist(), scaler.get_scale()))
    assert outcomes[:5] == outcomes[5:]


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
        finish(scaler, optimizer)
        assert params(optimizer)[0].tolist() == [expected]


def test_a_found_inf_that_users_have_set() -> None:
    """A found_inf set by users skips a step without a scaler, as with torch's fused step."""
    for cls in (amp_ext.optim.SGD, torch.optim.SGD):
        optimizer = cls([leaf([8.0])], lr=0.5, fused=True)
        optimizer.found_inf = torch.tensor(1.0)
        optimizer.step()
        assert params(optimizer)[0].tolist() == [1.0]
