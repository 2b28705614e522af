"""Programs of Apex's amp, as its documentation has them: what they compute at each level."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import amp_ext
from amp_ext.apex import amp, install
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

on_devices = pytest.mark.parametrize("device", DEVICES)
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)

# An output of two layers has been rounded to float16 at most 7 times, by 2**-11 each: input, weight
# and result of each layer, and batch norm's result. A squared error is off by twice that, and so
# are gradients; to first order what wrong gradients have done to the loss is the same share of what
# it has fallen by. Weights that are float16 themselves are rounded at every step.
ROUNDING = 2 * 2 * 7 * 2.0**-11
TOLERANCE = {"O0": 0.0, "O1": ROUNDING, "O2": ROUNDING, "O3": ROUNDING + 2 * STEPS * 2.0**-11}


@on_devices
@pytest.mark.parametrize(
    ("opt_level", "optimizer"),
    [
        (opt_level, optimizer)
        for opt_level in TOLERANCE
        for optimizer in ("torch.SGD", "torch.AdamW", "optim.AdamW")
        if optimizer == "torch.SGD" or opt_level != "O3"  # float16 moments of Adam vanish
    ],
)
def test_losses_are_those_of_float32(opt_level: str, optimizer: str, device: str) -> None:
    torchs = new(optimizer, device)
    off = amp_ext.GradScaler(device, enabled=False)
    expected = train_plain(*torchs, batches(device), off)
    model, ours = amp.initialize(*new(optimizer, device), opt_level=opt_level, verbosity=0)
    losses = train_apex(model, ours, batches(device))
    torch.testing.assert_close(losses, expected, rtol=TOLERANCE[opt_level], atol=0)


@on_devices
@every_optimizer
def test_o1_is_amp_ext_bit_for_bit(optimizer: str, device: str) -> None:
    plain, scaler = new(optimizer, device), amp_ext.GradScaler(device)
    expected = train_plain(*plain, batches(device), scaler, overflow=OVERFLOW)
    model, ours = amp.initialize(*new(optimizer, device), opt_level="O1", verbosity=0)
    assert train_apex(model, ours, batches(device), overflow=OVERFLOW) == expected
    assert_same(model, plain[0])
    state = amp.state_dict()["loss_scaler0"]
    assert state == {"loss_scale": 2.0**15, "unskipped": STEPS - OVERFLOW - 1}
    assert state["loss_scale"] == scaler.get_scale()


@on_devices
def test_o2_is_amp_ext_optim_with_masters(device: str) -> None:
    """Written out: what initialize does to model and optimizer, and a step."""
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
    masters = [
        state["master_param"] for state in optimizer.state.values() if "master_param" in state
    ]
    halves = [*ours[0].fc1.parameters(), *ours[0].fc2.parameters()]
    for master, param in zip(masters, halves, strict=True):
        assert torch.equal(master, ours[1].state[param]["master_param"])
        assert torch.equal(master.half(), param)


@pytest.mark.parametrize(
    ("opt_level", "given", "dtypes"),
    [
        ("O0", torch.float16, [torch.float32] * 3),
        ("O1", torch.float32, [torch.float32, torch.float16, torch.float16]),
        ("O2", torch.float32, [torch.float16] * 3),
        ("O3", torch.float32, [torch.float16] * 3),
    ],
)
def test_dtypes(opt_level: str, given: torch.dtype, dtypes: list[torch.dtype]) -> None:
    model, optimizer = amp.initialize(*new(), opt_level=opt_level, verbosity=0)
    params = list(model.parameters())
    x, _ = next(batches())
    assert model(x.to(given)).dtype == torch.float32
    assert model.dtypes == dtypes
    half = {"O0": 0, "O1": 0, "O2": 4, "O3": 6}[opt_level]
    assert sum(param.dtype == torch.float16 for param in params) == half
    assert model.norm.weight.dtype == (torch.float16 if opt_level == "O3" else torch.float32)
    assert optimizer.param_groups[0]["params"][0] is params[0]
    assert all(value.dtype != torch.float16 for value in model.state_dict().values())


def test_bfloat16_and_other_overrides() -> None:
    model, optimizer = amp.initialize(
        *new(),
        opt_level="O2",
        cast_model_type=torch.bfloat16,
        keep_batchnorm_fp32="False",
        loss_scale="128.0",
        cast_model_outputs=torch.float64,
        verbosity=0,
    )
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert model(torch.randn(32, 8)).dtype == torch.float64
    first, *_, last = train_apex(model, optimizer, list(batches(steps=1)) * 20)
    assert last < first
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 20}}


def test_what_is_returned_is_what_was_given() -> None:
    def models() -> list[nn.Module]:
        return [Net(), Net()]

    model, (a, b) = Net(), models()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, a, b, Net(), Net())]
    initialize = amp.initialize
    assert initialize(model, verbosity=0) is model
    assert initialize(model, optimizers[0], verbosity=0) == (model, optimizers[0])
    assert initialize(model, [optimizers[1]], verbosity=0) == (model, [optimizers[1]])
    assert initialize([a, b], optimizers[2], verbosity=0) == ([a, b], optimizers[2])
    assert initialize([a, b], optimizers[3:], verbosity=0) == ([a, b], optimizers[3:])
    assert initialize([a, b], verbosity=0) == [a, b]
    assert type(model).__name__ == "Net" and isinstance(model, Net)


def test_disabled_does_nothing() -> None:
    model, optimizer = new()
    assert amp.initialize(model, optimizer, enabled=False) == (model, optimizer)
    assert amp.initialize(model, enabled=False) is model
    assert type(model) is Net
    losses = train_apex(model, optimizer, batches())
    other, torchs = new()
    assert losses == train_plain(other, torchs, batches(), amp_ext.GradScaler("cpu", enabled=False))
    assert amp.state_dict() == {}


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_schedulers_know_of_steps(opt_level: str, when: str) -> None:
    """Also of one that was made for the optimizer that O2 has turned into another."""
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


class NoWait(TorchDispatchMode):
    """Refuses to bring a number to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host waits"
        return func(*args, **(kwargs or {}))


@on_devices
@pytest.mark.parametrize(
    ("opt_level", "optimizer"), [("O1", "optim.AdamW"), ("O2", "torch.SGD"), ("O2", "torch.AdamW")]
)
def test_a_step_that_is_skipped_waits_for_nothing(
    opt_level: str, optimizer: str, device: str
) -> None:
    model, optimizer = amp.initialize(*new(optimizer, device), opt_level=opt_level, verbosity=0)
    x, y = next(batches(device))
    for overflow in (False, True, False):
        before = model.fc1.weight.detach().clone()
        loss = loss_of(model, x, y, overflow)
        with NoWait():
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(before, model.fc1.weight) == overflow


def test_messages(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = amp.initialize(*new(), opt_level="O1")
    assert "opt_level=O1" in capsys.readouterr().out
    train_apex(model, optimizer, batches(), overflow=OVERFLOW)
    assert capsys.readouterr().out.splitlines() == [
        "amp_ext.apex.amp: overflow, step skipped; loss scale 0 is 32768.0 now"
    ]
    amp.initialize(*new(), verbosity=0)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("has_apex", [False, True])
def test_libraries_that_say_from_apex(
    has_apex: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where there is an Apex, its other parts stay."""
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
        assert names["scale_loss"] is amp.scale_loss
        if has_apex:
            exec("from apex.normalization import found", names)
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
            del sys.modules[name]
