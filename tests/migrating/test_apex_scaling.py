"""Losses of Apex's amp: the scale's machine, several losses, accumulation, checkpoints."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import amp_ext
from amp_ext.apex import _scaler, amp, from_grad_scaler, to_grad_scaler
from apex_program import (
    MAX_NORM,
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


class Machine:
    """A dynamic scale by Apex's documentation."""

    def __init__(self, window: int, min_loss_scale: float | None, max_loss_scale: float) -> None:
        self.scale, self.unskipped = min(max_loss_scale, 2.0**16), 0
        self.window, self.min, self.max = window, min_loss_scale, max_loss_scale

    def update(self, overflow: bool) -> None:
        if overflow:
            self.scale, self.unskipped = max(self.scale / 2, self.min or 0.0), 0
            return
        self.unskipped += 1
        if self.unskipped == self.window:
            self.scale, self.unskipped = min(self.scale * 2, self.max), 0

    def state(self) -> dict[str, float]:
        return {"loss_scale": self.scale, "unskipped": self.unskipped}


def a_loss(optimizer: Any, overflow: bool = False, **options: Any) -> None:
    (param,) = optimizer.param_groups[0]["params"]
    with amp.scale_loss(
        param.sum() * (float("inf") if overflow else 1.0), optimizer, **options
    ) as s:
        s.backward()


def one_weight(**options: Any) -> torch.optim.Optimizer:
    """Of O0, whose loss need not come from a model."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O0", verbosity=0, **options)
    nn.init.zeros_(model.weight)
    return optimizer


@pytest.mark.parametrize(
    "limits",
    [(None, 2.0**24), (2.0**15, 2.0**24), (None, 2.0**17), (3.0, 2.0**10), (2.0**17, 2.0**20)],
)
def test_the_scale_moves_as_apexs(
    limits: tuple[float | None, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_scaler, "WINDOW", 3)
    least, most = limits
    optimizer = one_weight(loss_scale="dynamic", min_loss_scale=least, max_loss_scale=most)
    machine, weight = Machine(3, *limits), 0.0
    for step in "....x..xx...........x.xxxxx...":
        optimizer.zero_grad()
        a_loss(optimizer, step == "x")
        optimizer.step()
        machine.update(step == "x")
        weight -= step == "."
        assert amp.state_dict()["loss_scaler0"] == machine.state()
    assert optimizer.param_groups[0]["params"][0].item() == weight


def test_the_window_is_of_2000_losses() -> None:
    optimizer = one_weight(loss_scale="dynamic")
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**23, "unskipped": 1999}})
    a_loss(optimizer)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**24, "unskipped": 0}
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**24, "unskipped": 1999}})
    a_loss(optimizer)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**24, "unskipped": 0}


def test_an_overflow_skips_one_step_of_each_optimizer_of_the_loss() -> None:
    """And stays until then, whatever other losses do."""
    models = [nn.Linear(1, 1, bias=False) for _ in range(3)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    amp.initialize(models, optimizers, opt_level="O0", loss_scale="dynamic", verbosity=0)
    for model in models:
        nn.init.zeros_(model.weight)
    loss = models[0].weight.sum() * float("inf") + models[1].weight.sum()
    with amp.scale_loss(loss, optimizers[:2]) as scaled_loss:
        scaled_loss.backward()
    a_loss(optimizers[2])
    a_loss(optimizers[1])
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**15, "unskipped": 2}
    for expected in ([0.0, 0.0, -1.0], [0.0, -1.0, -2.0]):
        for optimizer in optimizers:
            optimizer.step()
        optimizers[0].zero_grad()
        optimizers[1].param_groups[0]["params"][0].grad = torch.ones(1, 1)
        assert [model.weight.item() for model in models] == expected


@pytest.mark.parametrize("overflow", [None, "fake"])
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_two_networks_with_three_losses(opt_level: str, overflow: str | None) -> None:
    """As in the example of a GAN: two losses for one optimizer, each with a scale of its own."""
    torch.manual_seed(0)
    nets = [nn.Linear(4, 4), nn.Linear(4, 1)]
    plain = copy.deepcopy(nets)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    (g, d), (opt_g, opt_d) = amp.initialize(
        nets, optimizers, opt_level=opt_level, num_losses=3, verbosity=0
    )
    noise, real = torch.randn(16, 4), torch.randn(16, 4)
    amp.load_state_dict(
        {f"loss_scaler{i}": {"loss_scale": 2.0 ** (12 + i), "unskipped": i} for i in range(3)}
    )
    before = [param.detach().clone() for param in d.parameters()]
    opt_d.zero_grad()
    for loss_id, (name, x) in enumerate({"real": real, "fake": g(noise).detach()}.items()):
        loss = d(x).square().mean() * (float("inf") if name == overflow else 1.0)
        with amp.scale_loss(loss, opt_d, loss_id=loss_id) as scaled_loss:
            scaled_loss.backward()
    opt_d.step()
    opt_g.zero_grad()
    with amp.scale_loss(-d(g(noise)).mean(), opt_g, loss_id=2) as scaled_loss:
        scaled_loss.backward()
    opt_g.step()

    state = amp.state_dict()
    assert [state[f"loss_scaler{i}"]["loss_scale"] for i in range(3)] == [
        2.0**12,
        2.0**12 if overflow else 2.0**13,
        2.0**14,
    ]
    assert [state[f"loss_scaler{i}"]["unskipped"] for i in range(3)] == [1, 0 if overflow else 2, 3]
    if overflow:
        for param, was in zip(d.parameters(), before, strict=True):
            assert torch.equal(param, was)
        return
    (d_real, d_fake) = (plain[1](x).square().mean() for x in (real, plain[0](noise).detach()))
    grads = torch.autograd.grad(d_real + d_fake, list(plain[1].parameters()))
    for param, was, grad in zip(d.parameters(), before, grads, strict=True):
        # A gradient of two layers, each rounded thrice, of numbers up to 2; the weight once more.
        bound = 0.1 * 2 * 6 * 2.0**-11 + was.abs().max().item() * 2.0**-11
        torch.testing.assert_close(param.float(), was.float() - 0.1 * grad, rtol=0, atol=bound)


@pytest.mark.parametrize("delay", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("overflow", [None, 1, 2])
def test_accumulation_is_amp_exts(delay: bool, set_to_none: bool, overflow: int | None) -> None:
    """Bit for bit under O1, with an overflow in any of the three batches: then no step is made."""
    plain, torchs = new()
    scaler = amp_ext.GradScaler("cpu")
    model, optimizer = amp.initialize(*new(), opt_level="O1", verbosity=0)
    for _ in range(2):
        for i, (x, y) in enumerate(batches(steps=3)):
            with amp_ext.autocast("cpu", torch.float16):
                loss = loss_of(plain, x, y, i == overflow)
            scaler.scale(loss).backward()
            loss = loss_of(model, x, y, i == overflow)
            with amp.scale_loss(loss, optimizer, delay_unscale=delay and i < 2) as scaled_loss:
                scaled_loss.backward()
        scaler.unscale_(torchs)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), MAX_NORM)
        scaler.step(torchs)
        optimizer.step()
        scaler.update()
        torchs.zero_grad(set_to_none)
        optimizer.zero_grad(set_to_none)
    assert_same(model, plain)
    # Without delay each batch is a loss of its own.
    unskipped = {None: 6, 1: 1, 2: 0}[overflow] if not delay else (0 if overflow else 2)
    expected = {"loss_scale": 2.0**16 if overflow is None else 2.0**14, "unskipped": unskipped}
    assert amp.state_dict()["loss_scaler0"] == expected


def test_a_delayed_loss_adds_to_unscaled_gradients() -> None:
    """Not to gradients of another scale."""
    optimizer = one_weight(loss_scale=128.0)
    for delay in (False, True, True, False):
        a_loss(optimizer, delay_unscale=delay)
    optimizer.step()
    assert optimizer.param_groups[0]["params"][0].item() == -4.0


@pytest.mark.parametrize("delay", [True, False])
def test_accumulation_with_masters(delay: bool) -> None:
    """Gradients are unscaled once: three equal ones are three times one."""
    grads = []
    for count in (1, 3):
        model, optimizer = amp.initialize(*new(), opt_level="O2", verbosity=0)
        model.eval()
        x, y = next(batches())
        for i in range(count):
            with amp.scale_loss(
                loss_of(model, x, y), optimizer, delay_unscale=delay and i < count - 1
            ) as scaled_loss:
                scaled_loss.backward()
        grads.append([param.grad for param in amp.master_params(optimizer)])
    for one, three in zip(*grads, strict=True):
        assert one.dtype == three.dtype == torch.float32
        # Delayed, the sum is one of float16 and rounded twice.
        torch.testing.assert_close(three, 3 * one, rtol=2 * 2.0**-11 if delay else 2.0**-22, atol=0)


def test_gradients_that_float16_cannot_hold_unscaled() -> None:
    """What masters need float32 gradients for."""
    model, optimizer = amp.initialize(*new(), opt_level="O2", verbosity=0)
    x, y = next(batches())
    with amp.scale_loss(loss_of(model, x, y) * 2.0**-16, optimizer) as scaled_loss:
        scaled_loss.backward()
    grad = model.fc2.weight.grad
    assert 0 < grad.abs().max() < 2.0**-16 and grad.half().count_nonzero() < grad.count_nonzero()


def test_backward_passes_have_gradients_of_the_parameters_dtype() -> None:
    """In each step, as DistributedDataParallel's buckets have: also of products of a region, which
    would leave a parameter of ``grad_dtype`` None a float32 one."""

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


def test_parameters_that_are_added_later() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.2})
    before = model[0].weight.detach().clone()
    with amp.scale_loss(model(torch.ones(1, 4)).sum() / 64, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    master, grad = optimizer.state[model[0].weight]["master_param"], model[0].weight.grad
    assert torch.equal(master, before.float().add(grad, alpha=-0.2)) and grad.any()


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("optimizer", ["torch.AdamW", "optim.AdamW"])
def test_a_resumed_training_is_the_same(opt_level: str, optimizer: str) -> None:
    """Apex's documented order: initialize, then load."""
    overflow = 1 if opt_level in ("O1", "O2") else None
    data = list(batches())
    through, its = amp.initialize(*new(optimizer), opt_level=opt_level, verbosity=0)
    train_apex(through, its, data, overflow)
    expected = amp.state_dict()

    first, its = amp.initialize(*new(optimizer), opt_level=opt_level, verbosity=0)
    train_apex(first, its, data[:3], overflow)
    saved = copy.deepcopy([first.state_dict(), its.state_dict(), amp.state_dict()])

    torch.manual_seed(5)
    second = Net()
    fresh = type(new(optimizer)[1])(second.parameters())
    second, fresh = amp.initialize(second, fresh, opt_level=opt_level, verbosity=0)
    for part, state in zip((second, fresh, amp), saved, strict=True):
        part.load_state_dict(state)
    train_apex(second, fresh, data[3:])
    assert_same(second, through)
    assert amp.state_dict() == expected


def test_states_of_apex_and_of_grad_scalers() -> None:
    scaler = amp_ext.GradScaler("cpu")
    model, torchs = new()
    train_plain(model, torchs, batches(), scaler, overflow=OVERFLOW)
    amp.initialize(*new(), verbosity=0)
    amp.load_state_dict(from_grad_scaler(scaler.state_dict()))
    state = amp.state_dict()
    assert state == {"loss_scaler0": {"loss_scale": 2.0**15, "unskipped": STEPS - OVERFLOW - 1}}
    for other in (amp_ext.GradScaler("cpu"), torch.amp.GradScaler("cpu")):
        other.load_state_dict(to_grad_scaler(state["loss_scaler0"]))
        assert from_grad_scaler(other.state_dict()) == state
        assert other.get_growth_interval() == 2000
        assert (other.get_growth_factor(), other.get_backoff_factor()) == (2.0, 0.5)


def test_states_of_other_numbers_of_losses() -> None:
    states = from_grad_scaler(*({"scale": 2.0**i, "_growth_tracker": i} for i in range(3)))
    amp.initialize(*new(), num_losses=2, verbosity=0)
    with pytest.warns(UserWarning, match=r"of 3 losses, .* num_losses=2: the first"):
        amp.load_state_dict(states)
    assert amp.state_dict() == {key: states[key] for key in ("loss_scaler0", "loss_scaler1")}


def test_a_static_scale_counts_on_and_may_be_loaded() -> None:
    """As Apex's: without a window, and also where it was 1, which needs no unscaling."""
    optimizer = one_weight()
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1999}})
    a_loss(optimizer)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 8.0, "unskipped": 2000}
    optimizer.step()
    assert optimizer.param_groups[0]["params"][0].item() == -1.0


def test_a_static_scale_has_no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_scaler, "WINDOW", 1)
    optimizer = one_weight(loss_scale=8.0)
    for _ in range(2):
        a_loss(optimizer)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 8.0, "unskipped": 2}


def test_the_scale_as_scripts_set_it() -> None:
    """Apex has no other way to choose the initial scale."""
    optimizer = one_weight(loss_scale="dynamic")
    scaler = amp._amp_state.loss_scalers[0]
    scaler._loss_scale = 2.0**20
    assert scaler.loss_scale() == scaler._loss_scale == 2.0**20
    with amp.scale_loss(torch.ones((), requires_grad=True), optimizer) as scaled_loss:
        assert scaled_loss.item() == 2.0**20
        scaled_loss.backward()
    assert scaler._unskipped == 1


def test_a_backward_pass_that_fails_leaves_gradients() -> None:
    model, optimizer = amp.initialize(*new(), opt_level="O2", verbosity=0)
    (x, y), other = batches(steps=2)
    with amp.scale_loss(loss_of(model, x, y), optimizer) as scaled_loss:
        scaled_loss.backward()
    grads = [param.grad.clone() for param in model.parameters()]
    before = amp.state_dict()
    with (
        pytest.raises(ZeroDivisionError),
        amp.scale_loss(loss_of(model, *other), optimizer) as scaled_loss,
    ):
        scaled_loss.backward()
        1 / 0  # noqa: B018
    for param, grad in zip(model.parameters(), grads, strict=True):
        assert torch.equal(param.grad, grad)
    assert amp.state_dict() == before


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("has_grad", [False, True])
def test_a_backward_pass_that_fails_on_the_way_leaves_no_scaled_gradient(
    delay: bool, has_grad: bool
) -> None:
    optimizer = one_weight(loss_scale=128.0)
    (param,) = optimizer.param_groups[0]["params"]
    if has_grad:
        a_loss(optimizer)
    before = param.grad.clone() if has_grad else None
    failing = Failing.apply(torch.ones((), requires_grad=True))
    with (
        pytest.raises(ZeroDivisionError),
        amp.scale_loss(param.sum(), optimizer, delay_unscale=delay) as scaled_loss,
    ):
        scaled_loss.backward()
        failing.backward()
    assert param.grad == before if has_grad else param.grad is None


def test_a_scale_that_is_loaded_between_delayed_losses_is_an_error() -> None:
    optimizer = one_weight(loss_scale="dynamic")
    a_loss(optimizer, delay_unscale=True)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 0}})
    with pytest.raises(RuntimeError, match="its scale is another now"):
        a_loss(optimizer)


def test_a_step_that_fails_is_still_skipped_when_it_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer = one_weight(loss_scale="dynamic")
    a_loss(optimizer, overflow=True)
    with monkeypatch.context() as patch:
        patch.setattr(amp_ext.GradScaler, "step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
    optimizer.step()
    assert optimizer.param_groups[0]["params"][0].item() == 0
