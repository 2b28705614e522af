"""Apex's amp: ``from amp_ext.apex import amp`` in the place of ``from apex import amp``."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_ext._warnings import warn
from amp_ext.apex import _models, _optimizers
from amp_ext.apex._functions import (
    disable_casts,
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from amp_ext.apex._options import Options, options_of
from amp_ext.apex._scaler import LossScaler, to_grad_scaler
from amp_ext.apex._state import amp_state as _amp_state
from amp_ext.apex._state import say
from amp_ext.scaler import GradScaler
from amp_ext.scaler.parameters import params_of

__all__ = [
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]


def initialize(
    models: nn.Module | list[nn.Module],
    optimizers: Optimizer | list[Optimizer] | None = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """Prepares models and optimizers, in place: they stay the same objects, as do parameters.

    ======  ============  ============================================  ===========  ==========
    level   parameters    forward                                       masters      loss scale
    ======  ============  ============================================  ===========  ==========
    O0      float32       inputs cast to float32                        no           1
    O1      float32       under ``amp_ext.autocast`` to float16;        no           "dynamic"
                          16-bit outputs are cast to float32
    O2      float16 but   inputs cast to float16, outputs to float32    float32, by  "dynamic"
            batch norm                                                  amp_ext.optim
    O3      float16       inputs cast to float16, outputs to float32    no           1
    ======  ============  ============================================  ===========  ==========

    Args:
        models: a module or a list of modules, float32, not compiled or wrapped for several devices
            yet. Their device may be any that :class:`amp_ext.autocast` and
            :class:`amp_ext.GradScaler` serve.
        optimizers: an optimizer, a list of optimizers, or None. With master weights, ``Adam``,
            ``AdamW`` and ``SGD`` of torch become those of :mod:`amp_ext.optim`; with these, no step
            waits for the device.
        enabled: False leaves everything as it is, and makes the other functions do nothing.
        opt_level: "O0" to "O3".
        cast_model_type: another dtype of parameters and inputs, False for none. torch.bfloat16
            works too.
        patch_torch_functions: False for O1 without autocast.
        keep_batchnorm_fp32: whether parameters of batch norm stay float32 (also "True", "False").
        master_weights: whether 16-bit parameters have float32 masters.
        loss_scale: "dynamic", or a number, also as a string. A dynamic scale starts at 2**16, is
            halved after an overflow and doubled after 2000 losses without one.
        cast_model_outputs: the dtype of floating-point outputs.
        num_losses: how many losses have a scale of their own, by the ``loss_id`` of
            :func:`scale_loss`.
        verbosity: 0 for no messages.
        min_loss_scale, max_loss_scale: where a dynamic scale stops.

    Returns:
        ``(models, optimizers)``, each as it was given, alone or in a list; ``models`` where
        ``optimizers`` is None.

    Raises:
        TypeError: ``models`` or ``optimizers`` are something else.
        RuntimeError: an option that contradicts the level; a model that is wrapped, compiled or
            16-bit; an optimizer that was given before or, with master weights, has none.
        ValueError: an option has an impossible value.
        Nothing has changed then.
    """
    if not enabled:
        _amp_state.opt_properties, _amp_state.loss_scalers = Options(), []
        return models if optimizers is None else (models, optimizers)
    options = options_of(
        opt_level,
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
    )
    model_list = _listed(models, nn.Module, "models")
    optimizer_list = [] if optimizers is None else _listed(optimizers, Optimizer, "optimizers")
    _models.check_models(model_list)
    _optimizers.check_optimizers(optimizer_list, options.keeps_masters, opt_level)
    if not isinstance(num_losses, int) or num_losses < 1:
        raise ValueError(f"amp.initialize: num_losses must be 1 or more, got {num_losses!r}")
    device_types = tuple(dict.fromkeys(map(_models.device_type_of, model_list)))
    scalers = [
        LossScaler(index, device_types[0], options.loss_scale, min_loss_scale, max_loss_scale)
        for index in range(num_losses)
    ]
    for model in model_list:
        _models.prepare(model, options, cast_model_outputs)
    for optimizer in optimizer_list:
        _optimizers.prepare(optimizer, options.keeps_masters, not scalers[0].does_nothing)
    _amp_state.opt_properties, _amp_state.loss_scalers = options, scalers
    _amp_state.device_types, _amp_state.verbosity = device_types, verbosity
    _amp_state.forward_ran = False
    say(str(options), once=True)
    return models if optimizers is None else (models, optimizers)


def _listed(given: Any, kind: type, name: str) -> list[Any]:
    result = given if isinstance(given, list) else [given]
    if not all(isinstance(one, kind) for one in result) or (name == "models" and not result):
        raise TypeError(
            f"amp.initialize: {name} must be a {kind.__module__}.{kind.__name__} or a list of "
            f"them, got {given!r}"
        )
    return result


@contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Optimizer | list[Optimizer],
    loss_id: int = 0,
    model: nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """A context whose value is the scaled loss, of which it is left to call ``backward()``.

    At its end the gradients of the optimizers are unscaled and checked, and the scale moves. After
    an overflow the next ``step()`` of each of them does nothing. Gradients of earlier losses are
    added to. Nothing here waits for the device.

    Args:
        loss: of any shape.
        optimizers: those of :func:`initialize` whose parameters the loss gives gradients.
        loss_id: which of the ``num_losses`` scales.
        model: not used.
        delay_unscale: True leaves the gradients scaled and the scale where it is, for a later loss
            that adds to them.
        delay_overflow_check: must be False.

    Raises:
        RuntimeError: before :func:`initialize`; an optimizer that it was not given; under O1, no
            forward pass has run under autocast, as if methods of the models are called in the place
            of the models; gradients of a loss with ``delay_unscale`` have another scale.
        IndexError: there is no such ``loss_id``.
        NotImplementedError: ``delay_overflow_check``.
    """
    options = _options("scale_loss")
    if not options.enabled:
        yield loss
        return
    optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    scaler = _check_loss(options, optimizers, loss_id, delay_overflow_check)
    if scaler.does_nothing and not options.keeps_masters:
        yield loss.float()
        return
    for optimizer in optimizers:
        _optimizers.check_before(optimizer, scaler)
    scaled = scaler.scale(loss.float())
    for optimizer in optimizers:
        _optimizers.before_backward(optimizer, scaler, delay_unscale)
    try:
        yield scaled
    except BaseException:
        for optimizer in optimizers:
            _optimizers.give_up(optimizer)
        raise
    if not delay_unscale:
        return _optimizers.after_backward(optimizers, scaler)
    for optimizer in optimizers:
        _optimizers.after_delay(optimizer, scaler)


def _check_loss(
    options: Options, optimizers: list[Optimizer], loss_id: int, delay_overflow_check: bool
) -> LossScaler:
    if delay_overflow_check:
        raise NotImplementedError(
            "amp.scale_loss: delay_overflow_check=True is not supported: leave it out. The check "
            "does not wait for the device"
        )
    scalers = _amp_state.loss_scalers
    if not isinstance(loss_id, int) or not 0 <= loss_id < len(scalers):
        raise IndexError(
            f"amp.scale_loss: loss_id must be from 0 to {len(scalers) - 1}, got {loss_id!r}: give "
            "amp.initialize num_losses="
        )
    for optimizer in optimizers:
        if not hasattr(optimizer, "_amp_stash"):
            raise RuntimeError(
                f"amp.scale_loss: expected optimizers that amp.initialize was given, got "
                f"{type(optimizer).__name__}: model, optimizer = amp.initialize(model, optimizer)"
            )
    if options.patch_torch_functions and not _amp_state.forward_ran:
        raise RuntimeError(
            "amp.scale_loss: no forward pass of a model of amp.initialize has run under autocast: "
            "call model(...), not its other methods, or put the computation of the loss into 'with "
            "amp_ext.autocast(...):' and give amp.initialize patch_torch_functions=False"
        )
    return scalers[loss_id]


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """The optimizer's parameters, whose ``.grad`` is what its step will use: after
    :func:`scale_loss` unscaled, and with master weights float32. The masters themselves are in
    ``optimizer.state[param]["master_param"]``, from the first step on."""
    return params_of(optimizer)


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """The loss scales, as ``{"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}}``.
    Synchronises with the device. See :func:`amp_ext.apex.to_grad_scaler`."""
    _options("state_dict")
    destination = OrderedDict() if destination is None else destination
    for index, scaler in enumerate(_amp_state.loss_scalers):
        destination[f"loss_scaler{index}"] = scaler.apex_state()
    return destination


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Loads what :func:`state_dict`, or Apex's, has returned, in its order; warns where it holds
    another number of losses.

    Raises:
        RuntimeError: before :func:`initialize`; other entries than of loss scalers.
        KeyError: an entry has no ``"loss_scale"`` or ``"unskipped"``.
        TypeError, ValueError: as of ``GradScaler.load_state_dict``.
        Nothing has changed then.
    """
    _options("load_state_dict")
    unexpected = [key for key in state_dict if "loss_scaler" not in key]
    if unexpected:
        raise RuntimeError(
            f"amp.load_state_dict: unexpected {', '.join(map(repr, unexpected))}, expected "
            "'loss_scaler0' and so on. The state of a GradScaler is made one of amp's by "
            "amp_ext.apex.from_grad_scaler(state)"
        )
    scalers = _amp_state.loss_scalers
    if len(state_dict) != len(scalers):
        warn(
            f"amp.load_state_dict: the state is of {len(state_dict)} losses, amp.initialize was "
            f"given num_losses={len(scalers)}: the first ones are loaded"
        )
    for state in state_dict.values():
        if not {"loss_scale", "unskipped"} <= set(state):
            raise KeyError(f"amp.load_state_dict: expected loss_scale and unskipped, got {state}")
        GradScaler("cpu").load_state_dict(to_grad_scaler(state))  # raises for what is no number
    for scaler, state in zip(scalers, state_dict.values(), strict=False):
        scaler.load_apex_state(state)


def init(*args: Any, **kwargs: Any) -> None:
    """Of Apex's first interface. Raises RuntimeError."""
    raise RuntimeError(
        "amp.init: handles are not supported: write model, optimizer = amp.initialize(model, "
        "optimizer), and amp.scale_loss in the place of handle.scale_loss"
    )


def _options(name: str) -> Options:
    if _amp_state.opt_properties is None:
        raise RuntimeError(
            f"amp.{name}: call model, optimizer = amp.initialize(model, optimizer) before"
        )
    return _amp_state.opt_properties
