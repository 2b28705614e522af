"""Test Keras's mixed-precision guide on modules and optimizers of torch."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import amp_ext
from amp_ext.compat.keras import (
    LossScaleOptimizer,
    Policy,
    apply_policy,
    global_policy,
    set_global_policy,
)
from amp_ext.optim.lr_scheduler import SkipAware
from cases import assert_same

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def as_at_the_start() -> Any:
    torch.manual_seed(0)
    yield
    set_global_policy("float32")


class Classifier(nn.Module):
    """The guide's network: two wide layers, and an output in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.dense_1, self.dense_2 = nn.Linear(16, 32), nn.Linear(32, 32)
        self.dense_logits = nn.Linear(32, 10)
        self.predictions = nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense_1(x).relu()
        return self.predictions(self.dense_logits(self.dense_2(x).relu()))


INPUTS = torch.randn(8, 64, 16, generator=torch.Generator().manual_seed(1))
TARGETS = INPUTS[..., :10].argmax(-1)


def loss_of(predictions: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.nll_loss(predictions.log(), targets)


def train(model: nn.Module, optimizer: LossScaleOptimizer, overflow_at: int) -> None:
    """Run the guide's custom training loop, with torch.autograd.grad for GradientTape."""
    for step, (x, y) in enumerate(zip(INPUTS, TARGETS, strict=True)):
        loss = loss_of(model(x), y)
        variables = list(model.parameters())
        gradients = torch.autograd.grad(optimizer.scale_loss(loss), variables)
        if step == overflow_at:
            gradients[0][0, 0] = math.inf
        optimizer.apply(gradients, variables)


@pytest.mark.parametrize("make", [torch.optim.Adam, amp_ext.optim.Adam])
def test_an_overflow_is_skipped_as_by_the_scaler(make: Any) -> None:
    """Parameters, scale and states equal the ones of a loop with the scaler, bit for bit."""
    model = apply_policy(Classifier(), "mixed_float16")
    again = copy.deepcopy(model)
    optimizer = LossScaleOptimizer(make(model.parameters()), 2.0**10, 3)
    train(model, optimizer, overflow_at=3)

    inner = make(again.parameters())
    scaler = amp_ext.GradScaler("cpu", 2.0**10, growth_interval=3)
    for step, (x, y) in enumerate(zip(INPUTS, TARGETS, strict=True)):
        inner.zero_grad()
        scaler.scale(loss_of(again(x), y)).backward()
        if step == 3:
            again.dense_1.weight.grad[0, 0] = math.inf
        scaler.step(inner)
        scaler.update()
    assert optimizer.scaler.get_skipped_steps() == 1
    assert optimizer.dynamic_scale == 2.0**11
    assert optimizer.scaler.state_dict() == scaler.state_dict()
    states = optimizer.state_dict()["state"], inner.state_dict()["state"]
    for mine, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert_same(mine, theirs)
    for key, state in states[1].items():
        for name, value in state.items():
            assert_same(torch.as_tensor(states[0][key][name]), torch.as_tensor(value))


def test_gradients_are_given_in_three_ways() -> None:
    """apply, apply_gradients and minimize agree, also on a variable without a gradient."""
    results = []
    for way in range(3):
        a, b = (torch.full((2,), value, requires_grad=True) for value in (1.0, 2.0))
        optimizer = LossScaleOptimizer(torch.optim.SGD([a, b], 0.5), 4.0)
        b.grad = torch.full((2,), 100.0)  # of before
        loss = (a * a).sum()
        if way == 2:
            optimizer.minimize(loss)
        else:
            (grad,) = torch.autograd.grad(optimizer.scale_loss(loss), [a])
            pairs = [(grad, a), (None, b)]
            optimizer.apply_gradients(pairs) if way else optimizer.apply([grad, None])
        results.append((a.tolist(), b.tolist()))
    assert results == [([0.0, 0.0], [2.0, 2.0])] * 3


# ---- torch's interface -------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_schedules_and_hooks(fused: bool) -> None:
    """Schedules set the rates of the inner optimizer, and hooks see the steps that are made."""
    weight = torch.ones(1, requires_grad=True)
    optimizer = LossScaleOptimizer(torch.optim.SGD([weight], 1.0, fused=fused), 4.0)
    assert isinstance(optimizer, torch.optim.Optimizer)
    schedule = SkipAware(StepLR(optimizer, 1, 0.5), optimizer.scaler, exact=True)
    rates = []
    for grad in (1.0, math.inf, 1.0):
        optimizer.scale_loss((weight * grad).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.5, 0.5, 0.25]
    assert weight.grad is None
    assert optimizer.param_groups is optimizer.inner_optimizer.param_groups


def trained() -> tuple[Tensor, LossScaleOptimizer]:
    weight = torch.ones(2, requires_grad=True)
    optimizer = LossScaleOptimizer(torch.optim.Adam([weight], 0.1), 8.0, 3)
    for grad in (1.0, 2.0, math.inf, 1.0):
        optimizer.minimize((weight * grad).sum())
    return weight, optimizer


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_and_checkpoints(copied: Any) -> None:
    """Copies, pickles and checkpoints go on bit for bit."""
    weight, optimizer = trained()
    StepLR(optimizer, 1)  # replaces optimizer.step
    twin = copied(optimizer)
    fresh = LossScaleOptimizer(torch.optim.Adam([torch.ones(2, requires_grad=True)], 0.1))
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    fresh.param_groups[0]["params"][0].data.copy_(weight)
    assert twin.dynamic_scale == 4.0
    fresh.scaler.set_growth_interval(3)
    for each in (twin, fresh):
        (own,) = each.param_groups[0]["params"]
        for _ in range(2):
            each.minimize((own * 3).sum())
        assert each.dynamic_scale == 8.0
    for _ in range(2):
        optimizer.minimize((weight * 3).sum())
    assert_same(twin.param_groups[0]["params"][0], weight)
    assert_same(fresh.param_groups[0]["params"][0], weight)


def test_checkpoints_of_the_inner_optimizer() -> None:
    """Checkpoints of both load both ways; a bad one changes nothing."""
    weight, optimizer = trained()
    plain = torch.optim.Adam([weight], 0.1)
    plain.load_state_dict(optimizer.state_dict())
    assert plain.state_dict() == optimizer.inner_optimizer.state_dict()
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.dynamic_scale == 4.0
    bad = optimizer.state_dict()
    bad["loss_scale"] = {**bad["loss_scale"], "scale": 1e300}
    bad["param_groups"][0]["lr"] = 7.0
    with pytest.raises(ValueError, match="'scale' must be"):
        optimizer.load_state_dict(bad)
    assert (optimizer.param_groups[0]["lr"], optimizer.dynamic_scale) == (0.1, 4.0)


def test_add_param_group() -> None:
    """A group that is added is stepped, and has a learning rate of its own."""
    _, optimizer = trained()
    more = torch.ones(1, requires_grad=True)
    optimizer.add_param_group({"params": [more], "lr": 1.0})
    optimizer.minimize((more * 2).sum())
    assert more.item() == pytest.approx(0.0, abs=1e-6)  # Adam's first step is its rate of 1


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([torch.ones(2, requires_grad=True)], 1.0)


@pytest.mark.parametrize("inner", [3, LossScaleOptimizer(sgd())], ids=["int", "nested"])
def test_bad_optimizers(inner: Any) -> None:
    """Only an optimizer of torch has its loss scaled, with options of the scaler."""
    assert LossScaleOptimizer(sgd()).dynamic_scale == 2.0**15
    with pytest.raises(TypeError, match="inner_optimizer: expected an optimizer of torch, got"):
        LossScaleOptimizer(inner)
    with pytest.raises(TypeError, match="clipnorm"):
        LossScaleOptimizer(sgd(), clipnorm=1.0)


def test_bad_steps() -> None:
    """A step that would be wrong is an error, and changes nothing."""
    optimizer = LossScaleOptimizer(sgd(), 4.0)
    (weight,) = optimizer.param_groups[0]["params"]
    with pytest.raises(RuntimeError, match=r"Call scale_loss\(loss\).backward\(\) before"):
        optimizer.step()
    loss = optimizer.scale_loss(weight.sum())
    with pytest.raises(RuntimeError, match="closure: expected None"):
        optimizer.step(lambda: loss)
    for grads, variables, text in (
        ([], None, "expected 1, one for each variable, got 0"),
        ([torch.ones(3)], None, r"expected shape \(2,\) at index 0, got \(3,\)"),
        ([torch.ones(2)], [torch.ones(2)], "got another tensor at index 0"),
    ):
        with pytest.raises(ValueError, match=text):
            optimizer.apply(grads, variables)
    assert weight.grad is None
    loss.backward()
    optimizer.scaler.clip_grad_norm_(optimizer, 1.0)
    with pytest.raises(RuntimeError, match="Give it inner_optimizer"):
        optimizer.step()
    assert weight.tolist() == [1.0, 1.0]


def test_the_scaler_clips() -> None:
    """The scaler clips the gradients of the inner optimizer."""
    optimizer = LossScaleOptimizer(sgd(), 4.0)
    (weight,) = optimizer.param_groups[0]["params"]
    optimizer.scale_loss((weight * torch.tensor([3.0, 4.0])).sum()).backward()
    norm = optimizer.scaler.clip_grad_norm_(optimizer.inner_optimizer, 1.0)
    optimizer.step()
    assert norm.item() == 5.0
    assert weight.tolist() == pytest.approx([0.4, 0.2], abs=1e-6)  # 1e-6 is in the clip's divisor


# ---- policies ----------------------------------------------------------------------------------


def test_policies() -> None:
    """A policy has Keras's names of dtypes, and may be the global one."""
    assert global_policy() == Policy("float32")
    set_global_policy("mixed_bfloat16")
    policy = global_policy()
    dtypes = policy.name, policy.compute_dtype, policy.variable_dtype
    assert dtypes == ("mixed_bfloat16", "bfloat16", "float32")
    set_global_policy(Policy("mixed_float16"))
    assert apply_policy(nn.ReLU()).dtype_policy == Policy("mixed_float16") != policy


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("float16", "got 'float16'. Variables stay float32: write 'mixed_float16'"),
        ("mixed_float8", "one of 'float32', 'mixed_float16', 'mixed_bfloat16', got"),
        (torch.float16, "got torch.float16"),
    ],
    ids=str,
)
def test_bad_policies(name: Any, text: str) -> None:
    """A name that is no policy's is an error, and the global policy stays."""
    for call in (Policy, set_global_policy, lambda name: apply_policy(nn.ReLU(), name)):
        with pytest.raises(ValueError, match=f"Policy: name: .*{text}"):
            call(name)
    assert global_policy().name == "float32"


def types(model: nn.Module) -> list[torch.dtype]:
    """Return the dtypes of the layers' results, without a region and in one of bfloat16."""
    x = torch.ones(2, 4)
    seen = []
    hooks = [layer.register_forward_hook(lambda *a: seen.append(a[2].dtype)) for layer in model]
    model(x)
    with amp_ext.autocast("cpu", BF16):
        model(x)
    for hook in hooks:
        hook.remove()
    return seen


def test_a_modules_own_policy_wins() -> None:
    """A submodule's policy replaces the outer one, and both replace the caller's region."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert types(model) == [FP32, FP32, BF16, BF16]
    apply_policy(model, "mixed_float16")
    assert types(model) == [FP16, FP16, FP16, FP16]
    apply_policy(model[1], "float32")
    assert types(model) == [FP16, FP32, FP16, FP32]
    assert model[1].dtype_policy == Policy("float32")
    apply_policy(model, Policy("float32"), only=nn.Linear)
    assert types(model) == [FP32] * 4
    assert isinstance(model[0], nn.Linear)


def test_modules_that_cannot_have_a_policy() -> None:
    """Nothing of a model changes where one of its modules cannot have the policy."""
    attention = nn.MultiheadAttention(4, 2)
    for module, error, text, options in (
        (3, TypeError, "expected a torch.nn.Module, got 3", {}),
        (attention, ValueError, "reads the parameters of out_proj", {"only": nn.Linear}),
        (nn.ReLU(), ValueError, "has no module of only=", {"only": nn.Conv2d}),
    ):
        with pytest.raises(error, match=f"apply_policy: .*{text}"):
            apply_policy(module, "mixed_float16", **options)
    model = nn.Sequential(nn.Linear(4, 4), attention)
    with pytest.raises(ValueError, match="out_proj"):
        apply_policy(model, "mixed_float16", only=nn.Linear)
    assert type(model[0]) is nn.Linear
