"""Test programs of Apex's amp: their results at each level, and the scaling of losses."""

import copy
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_ext
from amp_ext.compat.apex import amp, from_grad_scaler, install, to_grad_scaler
from autocast_cases import Seen
from twins import CUDA

STEPS, OVERFLOW, MAX_NORM, LR = 6, 3, 0.5, 0.05
on_devices = pytest.mark.parametrize("device", ["cpu", *CUDA])

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "torch.SGD": lambda params: torch.optim.SGD(params, lr=LR, momentum=0.9),
    "torch.AdamW fused": lambda params: torch.optim.AdamW(params, lr=LR / 10, eps=1e-4, fused=True),
    "optim.AdamW": lambda params: amp_ext.optim.AdamW(params, lr=LR / 10, eps=1e-4),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.fc2 = nn.Linear(16, 4)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        result = self.fc2(torch.relu(self.norm(hidden)))
        self.dtypes = [x.dtype, hidden.dtype, result.dtype]
        return result


def new(optimizer: str = "torch.SGD", device: str = "cpu") -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net().to(device)
    return model, OPTIMIZERS[optimizer](model.parameters())


def batches(device: str = "cpu", steps: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x, y = (torch.randn(32, n, generator=generator) for n in (8, 4))
        yield x.to(device), y.to(device)


def loss_of(model: nn.Module, x: Tensor, y: Tensor, overflow: bool = False) -> Tensor:
    loss = nn.functional.mse_loss(model(x), y)
    return loss * float("inf") if overflow else loss


def train_apex(
    model: nn.Module, optimizer: Any, data: Any, overflow: int | None = None, first: int = 0
) -> list[float]:
    losses = []
    for step, (x, y) in enumerate(data, first):
        optimizer.zero_grad()
        loss = loss_of(model, x, y, step == overflow)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), MAX_NORM)
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same(one: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


# ---- the levels ----------------------------------------------------------------------------------


@on_devices
def test_o0_is_float32(device: str) -> None:
    """O0 makes the steps of the given objects without amp, which enabled=False leaves alone."""
    losses = []
    for options in ({"opt_level": "O0"}, {"enabled": False}):
        given = new(device=device)
        assert amp.initialize(*given, verbosity=0, **options) == given
        losses.append(train_apex(*given, batches(device)))
    assert losses[0] == losses[1]
    assert type(given[0]) is Net and amp.state_dict() == {}


@on_devices
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_o1_is_amp_ext_bit_for_bit(optimizer: str, device: str) -> None:
    """O1 makes the steps of a GradScaler and of amp_ext.autocast, with an overflow."""
    theirs, their_optimizer = new(optimizer, device)
    scaler, losses = amp_ext.GradScaler(device), []
    for step, (x, y) in enumerate(batches(device)):
        their_optimizer.zero_grad()
        with amp_ext.autocast(device, torch.float16):
            loss = loss_of(theirs, x, y, step == OVERFLOW)
        scaler.scale(loss).backward()
        scaler.unscale_(their_optimizer)
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), MAX_NORM)
        scaler.step(their_optimizer)
        scaler.update()
        losses.append(loss.item())
    model, ours = amp.initialize(*new(optimizer, device), opt_level="O1", verbosity=0)
    assert train_apex(model, ours, batches(device), overflow=OVERFLOW) == losses
    assert_same(model, theirs)
    state = amp.state_dict()["loss_scaler0"]
    assert state == {"loss_scale": 2.0**15, "unskipped": STEPS - OVERFLOW - 1}


@pytest.mark.parametrize(("opt_level", "half"), [("O0", 0), ("O1", 0), ("O2", 4), ("O3", 6)])
def test_dtypes(opt_level: str, half: int) -> None:
    """Each level has Apex's dtypes of parameters, inputs, results and state dicts."""
    model, optimizer = amp.initialize(*new(), opt_level=opt_level, verbosity=0)
    params = list(model.parameters())
    assert model(next(batches())[0]).dtype == torch.float32
    given = torch.float16 if half else torch.float32
    computed = torch.float32 if opt_level == "O0" else torch.float16
    assert model.dtypes == [given, computed, computed]
    assert sum(param.dtype == torch.float16 for param in params) == half
    assert (model.norm.weight.dtype == torch.float16) == (opt_level == "O3")
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


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_schedulers_see_steps(opt_level: str, when: str) -> None:
    """A scheduler from before or after initialize gives no warning, even if O2 changes a class."""
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


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2"])
def test_two_losses_of_two_optimizers(opt_level: str) -> None:
    """Losses add up, each has a scale, and an overflow skips a step of each of its optimizers.

    A backward pass that fails changes nothing. Every loss adds 1 to the gradients of its weights.
    """
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    first, second = (torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5) for model in models)
    for model in models:
        nn.init.zeros_(model.weight)
    options = {"loss_scale": "dynamic", "min_loss_scale": 768.0, "max_loss_scale": 2048.0}
    options |= {"opt_level": opt_level, "num_losses": 2, "verbosity": 0}
    assert amp.initialize(models, [first, second], **options) == (models, [first, second])
    for scaler in amp._State.scalers:
        scaler.set_growth_interval(3)

    def backward(loss_id: int, *optimizers: Any, factor: float = 1.0, fails: bool = False) -> None:
        weights = [optimizer.param_groups[0]["params"][0] for optimizer in optimizers]
        loss = sum(weight.float().sum() for weight in weights) * factor
        given = {"loss_id": loss_id, "delay_unscale": factor == 1.0}
        with amp.scale_loss(loss, list(optimizers), **given) as scaled_loss:
            scaled_loss.backward()
            assert not fails

    def assert_state(weights: list[float], *losses: tuple[float, int]) -> None:
        assert [tuple(state.values()) for state in amp.state_dict().values()] == list(losses)
        assert [model.weight.item() for model in models] == weights

    backward(0, second, first)
    backward(1, first)
    with pytest.raises(AssertionError):
        backward(1, first, second, fails=True)
    first.step()
    second.step()
    assert_state([-2.0, -1.0], (2048.0, 1), (2048.0, 1))
    first.zero_grad(set_to_none=False)
    second.zero_grad()

    backward(0, first, factor=math.inf)
    backward(1, second, first)
    first.step()
    second.step()
    assert_state([-2.0, -2.5], (1024.0, 0), (2048.0, 2))
    first.zero_grad()
    second.zero_grad()

    backward(0, second, first, factor=math.inf)
    backward(1, first)
    second.step()
    assert_state([-2.0, -2.5], (768.0, 0), (2048.0, 0))  # no scale leaves its limits
    first.step()
    first.zero_grad()
    for _ in range(3):
        backward(0, first)
    first.step()  # momentum of 2 / 2, and three gradients
    assert_state([-6.0, -2.5], (1536.0, 0), (2048.0, 0))


def test_the_window_is_of_2000_losses() -> None:
    """The scale doubles after 2000 losses, up to 2**24."""
    optimizer = one_weight(loss_scale="dynamic")
    for exponent in (23, 24):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**exponent, "unskipped": 1999}})
        a_loss(optimizer)
        assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**24, "unskipped": 0}


def test_masters() -> None:
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
    weight = model.fc2.weight
    grad, before = weight.grad, weight.detach().float()
    assert 0 < grad.abs().max() < 2.0**-16 and grad.half().count_nonzero() < grad.count_nonzero()
    optimizer.step()
    master = optimizer.state[weight]["master_param"]
    torch.testing.assert_close(master, before - LR * grad, rtol=2.0**-23, atol=2.0**-40)
    assert torch.equal(weight, master.half())


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
    through, optimizer = amp.initialize(*new("torch.AdamW fused"), opt_level=opt_level, verbosity=0)
    train_apex(through, optimizer, data, 1)
    expected = amp.state_dict()

    first, optimizer = amp.initialize(*new("torch.AdamW fused"), opt_level=opt_level, verbosity=0)
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


def test_what_cannot_be_prepared() -> None:
    """An option, a model or an optimizer that cannot be is an error, and nothing has changed."""
    model, optimizer = good = new()
    other = torch.optim.RMSprop(model.parameters())
    replaced = new()[1]
    replaced.step = lambda: None
    for arguments, options, error, text in (
        (good, {"opt_level": "02"}, ValueError, "expected one of O0, O1, O2, O3, got '02'"),
        (good, {"keep_batchnorm_fp32": "true"}, ValueError, "got 'true'"),
        (good, {"loss_scale": 1e39}, ValueError, r"positive float32, got 1e\+39"),
        (good, {"num_losses": 0}, ValueError, "expected an integer of at least 1, got 0"),
        ((Net,), {}, TypeError, "models: expected a torch"),
        (([],), {}, TypeError, "models: expected a torch"),
        ((model, 1), {}, TypeError, "optimizers: expected a torch"),
        ((nn.DataParallel(model),), {}, RuntimeError, "Wrap the model that"),
        ((model, other), {}, RuntimeError, "got RMSprop"),
        ((model, replaced), {}, RuntimeError, "before you replace step"),
        ((model, [optimizer] * 2), {}, RuntimeError, "was given before"),
    ):
        with pytest.raises(error, match=f"amp.initialize: .*{''.join(options)}.*{text}"):
            amp.initialize(*arguments, **{"opt_level": "O2"} | options)
    with pytest.raises(ValueError, match=r"got 2.0 and 4.0"):
        amp.initialize(model, optimizer, min_loss_scale=4.0, max_loss_scale=2.0)
    assert type(model) is Net and model.fc1.weight.dtype == torch.float32
    assert not hasattr(optimizer, "_amp_stash") and "step" not in vars(optimizer)


def test_bad_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """scale_loss refuses other losses and optimizers, and calls before initialize."""
    _, optimizer = amp.initialize(*new(), verbosity=0)
    loss = torch.ones((), requires_grad=True)
    with pytest.raises(IndexError):
        amp.scale_loss(loss, optimizer, loss_id=1).__enter__()
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


def test_a_loss_that_reaches_no_parameter() -> None:
    """Gradients of earlier losses stay, and the next losses train."""
    optimizer = one_weight(loss_scale="dynamic")
    a_loss(optimizer)
    with amp.scale_loss(torch.ones((), requires_grad=True), optimizer) as scaled:
        scaled.backward()
    a_loss(optimizer)
    optimizer.step()
    assert optimizer.param_groups[0]["params"][0].item() == -2.0


def test_closures() -> None:
    """A closure is an error where losses are scaled, since it would run after the check."""
    _, optimizer = amp.initialize(*new(), opt_level="O0", verbosity=0)
    assert optimizer.step(lambda: 3.0) == 3.0
    _, optimizer = amp.initialize(*new(), opt_level="O1", verbosity=0)
    with pytest.raises(RuntimeError, match="not in a closure"):
        optimizer.step(lambda: 0.0)


def test_an_optimizer_that_takes_the_scaler() -> None:
    """torch's scaler passes itself to a step with an argument for it, which is deprecated."""

    class TakesScaler(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: None = None, grad_scaler: Any = None) -> None:
            self.taken = grad_scaler

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
