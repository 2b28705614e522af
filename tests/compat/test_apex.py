"""Test programs of Apex's amp: their results at each level, and the scaling of losses."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amp_ext
from amp_ext.compat.apex import amp, from_grad_scaler, install, to_grad_scaler
from apex_program import (
    DEVICES,
    LR,
    MAX_NORM,
    OPTIMIZERS,
    OVERFLOW,
    STEPS,
    Net,
    assert_same,
    batches,
    loss_of,
    new,
    train_apex,
    train_plain,
)
from autocast_cases import Seen

on_devices = pytest.mark.parametrize("device", DEVICES)

# ---- the levels ----------------------------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("options", [{"opt_level": "O0"}, {"enabled": False}], ids=str)
def test_o0_is_float32(device: str, options: dict[str, Any]) -> None:
    """O0 and enabled=False make the steps of torch in float32, with the given objects."""
    off = amp_ext.GradScaler(device, enabled=False)
    expected = train_plain(*new(device=device), batches(device), off)
    given = new(device=device)
    assert amp.initialize(*given, verbosity=0, **options) == given
    assert train_apex(*given, batches(device)) == expected
    if "enabled" in options:
        assert type(given[0]) is Net and amp.state_dict() == {}


@on_devices
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_o1_is_amp_ext_bit_for_bit(optimizer: str, device: str) -> None:
    """O1 makes the steps of a GradScaler and of amp_ext.autocast, with an overflow."""
    plain, scaler = new(optimizer, device), amp_ext.GradScaler(device)
    expected = train_plain(*plain, batches(device), scaler, overflow=OVERFLOW)
    model, ours = amp.initialize(*new(optimizer, device), opt_level="O1", verbosity=0)
    assert train_apex(model, ours, batches(device), overflow=OVERFLOW) == expected
    assert_same(model, plain[0])
    state = amp.state_dict()["loss_scaler0"]
    assert state == {"loss_scale": 2.0**15, "unskipped": STEPS - OVERFLOW - 1}


@on_devices
def test_o2_is_amp_ext_optim_with_masters(device: str) -> None:
    """O2 makes the steps of amp_ext.optim with masters on unscaled float32 gradients."""
    model, _ = new(device=device)
    for layer in (model.fc1, model.fc2):
        layer.half()
    params = list(model.parameters())
    optimizer = amp_ext.optim.SGD(params, lr=0.05, momentum=0.9, master_weights=True)
    for x, y in batches(device):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x.half()).float(), y)
        (loss * 2.0**16).backward()
        for param in params:
            grad = param.grad.float() / 2.0**16
            param.grad = None
            param.grad_dtype = torch.float32
            param.grad = grad
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        for param in params:
            param.grad_dtype = param.dtype
    ours = amp.initialize(*new(device=device), opt_level="O2", verbosity=0)
    train_apex(*ours, batches(device))
    masters = [state["master_param"] for state in optimizer.state.values() if len(state) > 1]
    halves = [*ours[0].fc1.parameters(), *ours[0].fc2.parameters()]
    for master, param in zip(masters, halves, strict=True):
        assert torch.equal(master, ours[1].state[param]["master_param"])
        assert torch.equal(master.half(), param)


@pytest.mark.parametrize(
    ("opt_level", "dtypes"),
    [
        ("O0", [torch.float32] * 3),
        ("O1", [torch.float32, torch.float16, torch.float16]),
        ("O2", [torch.float16] * 3),
        ("O3", [torch.float16] * 3),
    ],
)
def test_dtypes(opt_level: str, dtypes: list[torch.dtype]) -> None:
    """Each level has Apex's dtypes of parameters, inputs, results and state dicts."""
    model, optimizer = amp.initialize(*new(), opt_level=opt_level, verbosity=0)
    params = list(model.parameters())
    assert model(next(batches())[0]).dtype == torch.float32
    assert model.dtypes == dtypes
    half = {"O0": 0, "O1": 0, "O2": 4, "O3": 6}[opt_level]
    assert sum(param.dtype == torch.float16 for param in params) == half
    assert model.norm.weight.dtype == (torch.float16 if opt_level == "O3" else torch.float32)
    assert optimizer.param_groups[0]["params"][0] is params[0]
    for state in (model.state_dict(), model.fc1.state_dict()):
        assert all(value.dtype != torch.float16 for value in state.values())


def test_overrides() -> None:
    """Options override the level's, also as strings."""
    options = {"keep_batchnorm_fp32": "False", "loss_scale": "128.0", "verbosity": 0}
    model, optimizer = amp.initialize(*new(), opt_level="O2", **options)
    assert {param.dtype for param in model.parameters()} == {torch.float16}
    first, *_, last = train_apex(model, optimizer, list(batches(steps=1)) * 20)
    assert last < first
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 20}}


def test_results_have_the_form_of_arguments() -> None:
    """Models and optimizers are returned as they were given, alone or in lists."""
    model, a, b = Net(), Net(), Net()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, a, b)]
    assert amp.initialize(model) is model
    assert amp.initialize(model, optimizers[0]) == (model, optimizers[0])
    assert amp.initialize([a, b], optimizers[1:]) == ([a, b], optimizers[1:])


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_schedulers_see_steps(opt_level: str, when: str) -> None:
    """A scheduler made before or after initialize gives no warning, even if O2 changes the class.

    O2 may change the optimizer's class.
    """
    model, optimizer = new()
    make = torch.optim.lr_scheduler.StepLR
    scheduler = make(optimizer, 2) if when == "before" else None
    model, same = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    scheduler = scheduler or make(optimizer, 2)
    assert same is optimizer
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            before = model.fc2.bias.detach().clone()
            train_apex(model, optimizer, batches(steps=1), overflow=0, first=step)
            scheduler.step()
            assert torch.equal(before, model.fc2.bias) == (step == 0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(LR * 0.01)


@on_devices
@pytest.mark.parametrize(("opt_level", "optimizer"), [("O1", "optim.AdamW"), ("O2", "torch.SGD")])
def test_a_skipped_step_waits_for_nothing(opt_level: str, optimizer: str, device: str) -> None:
    """Optimizers of amp_ext.optim, O2's too, skip a step on the device."""
    model, optimizer = amp.initialize(*new(optimizer, device), opt_level=opt_level, verbosity=0)
    x, y = next(batches(device))
    for overflow in (False, True, False):
        before = model.fc1.weight.detach().clone()
        loss = loss_of(model, x, y, overflow)
        with Seen() as seen:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        assert torch.ops.aten._local_scalar_dense.default not in seen.ops, "the host waits"
        optimizer.zero_grad()
        assert torch.equal(before, model.fc1.weight) == overflow


@pytest.mark.parametrize("has_apex", [False, True])
def test_install(has_apex: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``from apex import amp`` finds this one; other parts of an installed Apex stay."""
    if has_apex:
        (tmp_path / "apex").mkdir()
        (tmp_path / "apex/__init__.py").touch()
        (tmp_path / "apex/normalization.py").write_text("found = True")
        monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, Any] = {}
    try:
        install()
        exec("from apex import amp; import apex.amp; from apex.amp import scale_loss", names)
        assert names["amp"] is names["apex"].amp is amp
        if has_apex:
            exec("from apex.normalization import found", names)
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
            del sys.modules[name]


# ---- losses --------------------------------------------------------------------------------------


def a_loss(optimizer: Any, overflow: bool = False, **options: Any) -> None:
    (param,) = optimizer.param_groups[0]["params"]
    loss = param.sum() * (float("inf") if overflow else 1.0)
    with amp.scale_loss(loss, optimizer, **options) as scaled_loss:
        scaled_loss.backward()


def one_weight(**options: Any) -> torch.optim.Optimizer:
    """Return the optimizer of one weight of 0, with a learning rate of 1."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O0", verbosity=0, **options)
    nn.init.zeros_(model.weight)
    return optimizer


class Expected:
    """The effect of losses and steps by Apex's rules, for weights with gradients of 1.

    Args:
        limits: the least and the greatest scale.
    """

    def __init__(self, limits: tuple[float, float]) -> None:
        self.limits = limits
        self.scales = 2 * [min(2.0**16, limits[1])]
        self.unskipped, self.weights, self.grads = 2 * [0], 2 * [0.0], 2 * [0.0]
        self.skips = 2 * [False]

    def loss(self, loss_id: int, used: list[int], overflow: bool) -> None:
        """Move the scale, with a window of 3 losses, and add to the gradients of some weights."""
        least, most = self.limits
        self.unskipped[loss_id] += 1
        if overflow:
            self.scales[loss_id] = max(self.scales[loss_id] / 2, least)
            self.unskipped[loss_id] = 0
        elif self.unskipped[loss_id] == 3:
            self.scales[loss_id] = min(self.scales[loss_id] * 2, most)
            self.unskipped[loss_id] = 0
        for i in used:
            self.grads[i] += 1
            self.skips[i] |= overflow

    def step(self, i: int) -> None:
        if not self.skips[i]:
            self.weights[i] -= self.grads[i]
        self.grads[i], self.skips[i] = 0, False


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2"])
def test_any_program(opt_level: str, seed: int) -> None:
    """Losses add up, each has a scale, and an overflow skips a step of each of its optimizers.

    A backward pass that fails changes nothing.
    """
    chance = random.Random(seed)
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    for model in models:
        nn.init.zeros_(model.weight)
    expected = Expected(chance.choice([(1.0, 2.0**12), (3.0, 4.0)]))
    limits = dict(zip(("min_loss_scale", "max_loss_scale"), expected.limits, strict=True))
    options = {"opt_level": opt_level, "loss_scale": "dynamic", "num_losses": 2, "verbosity": 0}
    amp.initialize(models, optimizers, **options, **limits)
    for scaler in amp._State.scalers:
        scaler.set_growth_interval(3)
    for _ in range(60):
        if chance.random() < 0.4:
            i = chance.randrange(2)
            optimizers[i].step()
            optimizers[i].zero_grad(set_to_none=chance.random() < 0.5)
            expected.step(i)
        else:
            loss_id, used = chance.randrange(2), chance.choice([[0], [1], [1, 0]])
            overflow, fails = chance.random() < 0.2, chance.random() < 0.1
            loss = sum(models[i].weight.float().sum() for i in used)
            if overflow:
                loss = loss + models[used[0]].weight.float().sum() * float("inf")
            given = {"loss_id": loss_id, "delay_unscale": chance.random() < 0.5}
            error = pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext()
            with error, amp.scale_loss(loss, [optimizers[i] for i in used], **given) as scaled_loss:
                scaled_loss.backward()
                1 / (not fails)
            if not fails:
                expected.loss(loss_id, used, overflow)
        states = [tuple(state.values()) for state in amp.state_dict().values()]
        assert states == list(zip(expected.scales, expected.unskipped, strict=True))
        assert [model.weight.item() for model in models] == expected.weights


def test_the_window_is_of_2000_losses() -> None:
    """The scale doubles after 2000 losses, up to 2**24."""
    optimizer = one_weight(loss_scale="dynamic")
    for exponent in (23, 24):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**exponent, "unskipped": 1999}})
        a_loss(optimizer)
        assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**24, "unskipped": 0}


def test_gradients_of_masters() -> None:
    """Masters get float32 gradients of accumulated losses, even if they vanish in float16."""
    grads = []
    for count in (1, 3):
        model, optimizer = amp.initialize(*new(), opt_level="O2", verbosity=0)
        model.eval()
        x, y = next(batches())
        for _ in range(count):
            with amp.scale_loss(loss_of(model, x, y) * 2.0**-16, optimizer) as scaled_loss:
                scaled_loss.backward()
        grads.append([param.grad for param in amp.master_params(optimizer)])
    for one, three in zip(*grads, strict=True):
        assert one.dtype == three.dtype == torch.float32
        torch.testing.assert_close(three, 3 * one, rtol=2.0**-22, atol=0)
    grad = model.fc2.weight.grad
    assert 0 < grad.abs().max() < 2.0**-16 and grad.half().count_nonzero() < grad.count_nonzero()


def test_backward_passes_have_gradients_of_the_parameters_dtype() -> None:
    """In each step gradients arrive in float16, as in DistributedDataParallel's buckets."""

    class Within(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with amp_ext.autocast("cpu", torch.float16):
                return super().forward(x)

    model = Within(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    dtypes = []
    model.weight.register_post_accumulate_grad_hook(lambda param: dtypes.append(param.grad.dtype))
    train_apex(model, optimizer, batches(steps=2))
    assert dtypes == [torch.float16] * 2 and model.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_a_resumed_training_is_the_same(opt_level: str) -> None:
    """After initialize, states of model, optimizer and amp load as Apex documents it."""
    data = list(batches())
    through, optimizer = amp.initialize(*new("torch.AdamW"), opt_level=opt_level, verbosity=0)
    train_apex(through, optimizer, data, 1)
    expected = amp.state_dict()

    first, optimizer = amp.initialize(*new("torch.AdamW"), opt_level=opt_level, verbosity=0)
    train_apex(first, optimizer, data[:3], 1)
    saved = copy.deepcopy([first.state_dict(), optimizer.state_dict(), amp.state_dict()])

    second = Net()
    fresh = torch.optim.AdamW(second.parameters())
    second, fresh = amp.initialize(second, fresh, opt_level=opt_level, verbosity=0)
    for part, state in zip((second, fresh, amp), saved, strict=True):
        part.load_state_dict(state)
    train_apex(second, fresh, data[3:])
    assert_same(second, through)
    assert amp.state_dict() == expected


def test_states_of_apex_and_of_grad_scalers() -> None:
    """States convert both ways, and another number of losses is a warning."""
    states = from_grad_scaler(*({"scale": 2.0**i, "_growth_tracker": i} for i in range(3)))
    amp.initialize(*new(), num_losses=2, verbosity=0)
    with pytest.warns(UserWarning, match=r"of 3 losses, .* num_losses=2: the first") as warned:
        amp.load_state_dict(states)
    assert [warning.filename for warning in warned] == [__file__]
    assert amp.state_dict() == {key: states[key] for key in ("loss_scaler0", "loss_scaler1")}
    for other in (amp_ext.GradScaler("cpu"), torch.amp.GradScaler("cpu")):
        other.load_state_dict(to_grad_scaler(states["loss_scaler1"]))
        assert from_grad_scaler(other.state_dict())["loss_scaler0"] == states["loss_scaler1"]
        assert other.get_growth_interval() == 2000


def test_a_static_scale_of_1_may_be_loaded() -> None:
    """Gradients are unscaled by a scale that replaces 1."""
    optimizer = one_weight()
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 0}})
    a_loss(optimizer)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 8.0, "unskipped": 1}
    optimizer.step()
    assert optimizer.param_groups[0]["params"][0].item() == -1.0


def test_a_step_that_fails_is_skipped_when_it_is_tried_again() -> None:
    """An overflow stays recorded until a step has been made or skipped."""
    optimizer = one_weight(loss_scale="dynamic")
    a_loss(optimizer, overflow=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(amp_ext.GradScaler, "step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
    optimizer.step()
    assert optimizer.param_groups[0]["params"][0].item() == 0


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"opt_level": "02"}, "opt_level: expected one of O0, O1, O2, O3, got '02'"),
        ({"opt_level": "O2", "keep_batchnorm_fp32": "true"}, "got 'true'"),
        ({"loss_scale": "dynamical"}, "could not convert"),
        ({"loss_scale": 1e39}, r"positive float32, got 1e\+39"),
        ({"num_losses": 0}, "num_losses: expected an integer of at least 1, got 0"),
        ({"min_loss_scale": 4.0, "max_loss_scale": 2.0}, "4.0 and 2.0"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_options(options: dict[str, Any], text: str) -> None:
    """An option that cannot be is an error, and nothing has changed."""
    model, optimizer = new()
    with pytest.raises(ValueError, match=text):
        amp.initialize(model, optimizer, **options)
    assert type(model) is Net and model.fc1.weight.dtype == torch.float32
    assert not hasattr(optimizer, "_amp_stash") and "step" not in vars(optimizer)


def replaced_step() -> torch.optim.Optimizer:
    optimizer = new()[1]
    optimizer.step = lambda: None
    return optimizer


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (lambda: (Net,), TypeError, "models: expected a torch"),
        (lambda: ([],), TypeError, "models: expected a torch"),
        (lambda: (Net(), 1), TypeError, "optimizers: expected a torch"),
        (lambda: (nn.DataParallel(Net()),), RuntimeError, "Wrap the model that"),
        (lambda: (Net(), torch.optim.RMSprop(Net().parameters())), RuntimeError, "got RMSprop"),
        (lambda: (Net(), replaced_step()), RuntimeError, "before you replace step"),
        (lambda: (Net(), [new()[1]] * 2), RuntimeError, "was given before"),
    ],
    ids=["class", "none", "number", "DataParallel", "RMSprop", "step", "twice"],
)
def test_bad_models_and_optimizers(
    arguments: Callable[[], Any], error: type[Exception], text: str
) -> None:
    """O2 refuses models and optimizers it cannot prepare."""
    with pytest.raises(error, match=f"amp.initialize: {text}|{text}"):
        amp.initialize(*arguments(), opt_level="O2")


def test_bad_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """scale_loss refuses other losses and optimizers, and calls before initialize."""
    _, optimizer = amp.initialize(*new(), verbosity=0)
    loss = torch.ones((), requires_grad=True)
    for loss_id in (1, -1):
        with pytest.raises(IndexError, match="loss_id: expected 0 to 0, got"):
            amp.scale_loss(loss, optimizer, loss_id).__enter__()
    with pytest.raises(RuntimeError, match=r"expected those of .*, got another SGD"):
        amp.scale_loss(loss, new()[1]).__enter__()
    monkeypatch.setattr(amp._State, "options", None)
    for call in (
        lambda: amp.scale_loss(loss, optimizer).__enter__(),
        amp.state_dict,
        lambda: amp.load_state_dict({}),
    ):
        with pytest.raises(RuntimeError, match=r"call model, optimizer = amp.initialize"):
            call()


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2"])
def test_closures(opt_level: str) -> None:
    """A closure is an error where losses are scaled, since it would run after the check."""
    _, optimizer = amp.initialize(*new(), opt_level=opt_level, verbosity=0)
    if opt_level == "O0":
        assert optimizer.step(lambda: 3.0) == 3.0
        return
    with pytest.raises(RuntimeError, match="not in a closure"):
        optimizer.step(lambda: 0.0)


class TakesScaler(torch.optim.SGD):
    """Take torch's scaler as an argument, which torch has deprecated."""

    _step_supports_amp_scaling = True

    def step(self, closure: None = None, grad_scaler: Any = None) -> None:
        self.taken = grad_scaler


def test_an_optimizer_that_takes_the_scaler() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = TakesScaler(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, verbosity=0)
    a_loss(optimizer)
    optimizer.step()
    assert isinstance(optimizer.taken, torch.amp.GradScaler)


def test_a_bad_state_changes_nothing() -> None:
    """A state with one bad entry is refused whole."""
    amp.initialize(*new(), num_losses=2, verbosity=0)
    before = amp.state_dict()
    for bad, error in (({}, KeyError), ({"loss_scale": "x", "unskipped": 0}, TypeError)):
        with pytest.raises(error):
            amp.load_state_dict({"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}, "1": bad})
    assert amp.state_dict() == before
