"""What Apex's amp refuses, and what this one cannot keep: errors, and nothing has changed then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from amp_ext.apex import amp
from apex_program import Net, batches, loss_of, new, train_apex


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"opt_level": "02"}, RuntimeError, "with the letter O, got '02'"),
        ({"cast_model_type": torch.float16}, RuntimeError, "write opt_level='O2' or 'O3'"),
        ({"keep_batchnorm_fp32": True}, RuntimeError, "keep_batchnorm_fp32=True: leave it out"),
        ({"master_weights": False}, RuntimeError, "master_weights=False: leave it out"),
        (
            {"opt_level": "O2", "patch_torch_functions": True},
            RuntimeError,
            "contradicts opt_level='O2': write opt_level='O1'",
        ),
        ({"opt_level": "O2", "cast_model_type": torch.int8}, ValueError, "got torch.int8"),
        ({"opt_level": "O2", "keep_batchnorm_fp32": "true"}, ValueError, "got 'true'"),
        ({"loss_scale": "dynamical"}, ValueError, "'dynamic' or a positive number .* got 'dynam"),
        ({"loss_scale": 0}, ValueError, "got 0"),
        ({"loss_scale": 1e39}, ValueError, "float32's range"),
        ({"num_losses": 0}, ValueError, "num_losses must be 1 or more, got 0"),
        ({"min_loss_scale": 4.0, "max_loss_scale": 2.0}, ValueError, "4.0 and 2.0"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    model, optimizer = new()
    state = amp._amp_state.opt_properties
    with pytest.raises(error, match=message):
        amp.initialize(model, optimizer, verbosity=0, **options)
    assert_untouched(model, optimizer)
    assert amp._amp_state.opt_properties is state


def assert_untouched(model: nn.Module, optimizer: Any) -> None:
    assert type(model) is Net and model.fc1.weight.dtype == torch.float32
    assert not hasattr(optimizer, "_amp_stash") and "step" not in vars(optimizer)


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (nn.DataParallel, "got a DataParallel: wrap the model that it returns"),
        (lambda model: torch.compile(model, backend="eager"), "amp.initialize before"),
        (torch.jit.script, "amp.initialize before"),
        (torch.fx.symbolic_trace, "amp.initialize before"),
        (lambda model: model.half(), "weight of Linear is torch.float16.*do not call .half()"),
    ],
    ids=["DataParallel", "compile", "script", "fx", "half"],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_models(wrap: Any, message: str) -> None:
    other, optimizer = new()
    with pytest.raises(RuntimeError, match=message):
        amp.initialize([other, wrap(nn.Linear(2, 2))], optimizer, opt_level="O2", verbosity=0)
    assert_untouched(other, optimizer)


def test_types() -> None:
    model, optimizer = new()
    for arguments, name in (((Net,), "models"), (([],), "models"), ((model, 1), "optimizers")):
        with pytest.raises(TypeError, match=f"amp.initialize: {name} must be a torch"):
            amp.initialize(*arguments, verbosity=0)
    assert_untouched(model, optimizer)


def test_optimizers_without_masters() -> None:
    model, optimizer = new()
    other = torch.optim.RMSprop(model.parameters())
    with pytest.raises(RuntimeError, match=r"got RMSprop: write opt_level='O1'"):
        amp.initialize(model, [optimizer, other], opt_level="O2", verbosity=0)
    assert_untouched(model, optimizer)
    amp.initialize(
        Net(), torch.optim.RMSprop(Net().parameters()), opt_level="O0", master_weights=True
    )
    losses = train_apex(*amp.initialize(model, other, opt_level="O1", verbosity=0), batches())
    assert losses[-1] == losses[-1]


def test_a_step_that_someone_has_replaced() -> None:
    """O2 would replace what it wraps."""
    model, optimizer = new()
    optimizer.step = lambda: None
    with pytest.raises(RuntimeError, match=r"replaced the step of this SGD.*before it"):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert type(model) is Net


def test_an_optimizer_is_given_once() -> None:
    model, optimizer = amp.initialize(*new(), verbosity=0)
    with pytest.raises(RuntimeError, match=r"given to amp.initialize before: make a new one"):
        amp.initialize(model, optimizer, verbosity=0)


def test_before_initialize(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amp._amp_state, "opt_properties", None)
    loss = torch.ones(())
    for call in (
        lambda: amp.scale_loss(loss, new()[1]).__enter__(),
        amp.state_dict,
        lambda: amp.load_state_dict({}),
    ):
        with pytest.raises(RuntimeError, match=r"call model, optimizer = amp.initialize"):
            call()
    with pytest.raises(RuntimeError, match=r"handles are not supported: write .* amp.initialize"):
        amp.init()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"loss_id": 1}, IndexError, "loss_id must be from 0 to 0, got 1.*num_losses="),
        ({"loss_id": -1}, IndexError, "got -1"),
        ({"delay_overflow_check": True}, NotImplementedError, "leave it out"),
        ({"optimizers": 0}, RuntimeError, "optimizers that amp.initialize was given, got SGD"),
    ],
    ids=["loss_id", "negative", "delay_overflow_check", "optimizer"],
)
def test_scale_loss(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    model, optimizer = amp.initialize(*new(), verbosity=0)
    loss = loss_of(model, *next(batches()))
    if "optimizers" in arguments:
        arguments = {"optimizers": new()[1]}
    with (
        pytest.raises(error, match=message),
        amp.scale_loss(loss, **{"optimizers": optimizer, **arguments}),
    ):
        raise AssertionError("its body must not run")
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 0


def test_a_loss_of_methods_that_are_not_autocast() -> None:
    model, optimizer = amp.initialize(*new(), verbosity=0)
    x, _ = next(batches())
    loss = model.fc1(x).sum()
    with (
        pytest.raises(RuntimeError, match=r"no forward pass .* call model\(...\), not its other"),
        amp.scale_loss(loss, optimizer),
    ):
        pass


def test_a_step_of_scaled_gradients() -> None:
    model, optimizer = amp.initialize(*new(), verbosity=0)
    before = model.fc2.bias.detach().clone()
    with amp.scale_loss(
        loss_of(model, *next(batches())), optimizer, delay_unscale=True
    ) as scaled_loss:
        scaled_loss.backward()
    with pytest.raises(RuntimeError, match=r"gradients are scaled.*delay_unscale=True: leave"):
        optimizer.step()
    assert torch.equal(model.fc2.bias, before)


@pytest.mark.parametrize("zero_grad", [False, True])
@pytest.mark.parametrize("other", ["loss_id", "update"])
def test_gradients_of_two_scales(other: str, zero_grad: bool) -> None:
    """Without them, or without the scaled ones, there is nothing wrong."""
    model, optimizer = new()
    second = torch.optim.SGD(model.parameters(), lr=0.0)
    model, (optimizer, second) = amp.initialize(
        model, [optimizer, second], num_losses=2, verbosity=0
    )
    x, y = next(batches())
    with amp.scale_loss(loss_of(model, x, y), optimizer, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
    if other == "update":
        with amp.scale_loss(loss_of(model, x, y), second) as scaled_loss:
            scaled_loss.backward()
    if zero_grad:
        model.zero_grad()
    loss = loss_of(model, x, y)
    context = amp.scale_loss(loss, optimizer, loss_id=int(other == "loss_id"))
    if zero_grad:
        with context as scaled_loss:
            scaled_loss.backward()
        return optimizer.step()
    with pytest.raises(RuntimeError, match=r"delay_unscale=True.*num_losses= of"), context:
        raise AssertionError("its body must not run")


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2"])
def test_closures(opt_level: str) -> None:
    """As Apex's documentation has it; without scaling there is nothing to decide."""
    _, optimizer = amp.initialize(*new(), opt_level=opt_level, verbosity=0)
    if opt_level == "O0":
        assert optimizer.step(lambda: 3.0) == 3.0
        return
    for arguments, keywords in (((lambda: 0.0,), {}), ((), {"closure": lambda: 0.0})):
        with pytest.raises(RuntimeError, match=r"closure .* gradients before step"):
            optimizer.step(*arguments, **keywords)


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ({"scale": 2.0}, RuntimeError, r"unexpected 'scale'.*from_grad_scaler\(state\)"),
        ({"loss_scaler0": {"loss_scale": 1.0}}, KeyError, "loss_scale and unskipped"),
        (
            {
                "loss_scaler0": {"loss_scale": 1.0, "unskipped": 0},
                "loss_scaler1": {"loss_scale": "x", "unskipped": 0},
            },
            TypeError,
            "must be a number",
        ),
    ],
    ids=["GradScaler", "missing", "text"],
)
def test_load_state_dict(state: dict[str, Any], error: type[Exception], message: str) -> None:
    amp.initialize(*new(), num_losses=len(state), verbosity=0)
    before = amp.state_dict()
    with pytest.raises(error, match=message):
        amp.load_state_dict(state)
    assert amp.state_dict() == before


def test_registering_what_is_not_there() -> None:
    for kind in ("half", "float", "promote"):
        with pytest.raises(ValueError, match=r"has no function 'nothing'"):
            getattr(amp, f"register_{kind}_function")(torch, "nothing")
