"""Apex's amp: initialize, scale_loss, and the state of the loss scales."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from amp_ext._warnings import warn
from amp_ext.compat import casting
from amp_ext.compat.apex import optimizers as _optimizers
from amp_ext.compat.apex.scaler import LossScaler, from_grad_scaler, to_grad_scaler
from amp_ext.compat.casting import FLOATS, HALVES, Cast, Casts
from amp_ext.scaler import GradScaler
from amp_ext.scaler.optimizers import params_of

__all__ = [
    "initialize",
    "load_state_dict",
    "master_params",
    "scale_loss",
    "state_dict",
]


@dataclass(frozen=True)
class Options:
    """The options of a level.

    Attributes:
        dtype: of parameters and inputs; None for forward under autocast to float16.
        keep_batchnorm_fp32, loss_scale: as of :func:`initialize`.
        has_masters: whether 16-bit parameters have float32 masters.
    """

    dtype: torch.dtype | None = None
    keep_batchnorm_fp32: bool | str = False
    has_masters: bool = False
    loss_scale: float | str = 1.0
    enabled: bool = True

    def casts(self) -> Casts:
        if self.dtype is None:
            return Casts(torch.float16, outputs=Cast(HALVES, torch.float32))
        return Casts(None, Cast(FLOATS, self.dtype), Cast(FLOATS, torch.float32))


_LEVELS = {
    "O0": Options(torch.float32),
    "O1": Options(loss_scale="dynamic"),
    "O2": Options(torch.float16, keep_batchnorm_fp32=True, has_masters=True, loss_scale="dynamic"),
    "O3": Options(torch.float16),
}


class _State:
    """The result of the last call of initialize, in every thread."""

    options: Options | None = None
    scalers: tuple[LossScaler, ...] = ()


def initialize(
    models: nn.Module | list[nn.Module],
    optimizers: Optimizer | list[Optimizer] | None = None,
    enabled: bool = True,
    opt_level: str = "O1",
    *,
    keep_batchnorm_fp32: bool | str | None = None,
    loss_scale: float | str | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """Prepare models and optimizers in place.

    Models, optimizers and parameters stay the same objects. O0 casts inputs to float32. O1 runs
    forward under ``amp_ext.autocast`` to float16, and casts 16-bit outputs to float32. O2 and O3
    cast parameters and inputs to float16 and outputs to float32. O2 keeps batch norm in float32,
    and float32 masters in :mod:`amp_ext.optim`. O1 and O2 have a dynamic scale, O0 and O3 a scale
    of 1.

    Args:
        models: a module or a list of modules, float32, on any device, not compiled or wrapped for
            several devices yet.
        optimizers: an optimizer, a list of optimizers, or None. With master weights, ``Adam``,
            ``AdamW`` and ``SGD`` of torch become the classes of :mod:`amp_ext.optim`, and no step
            waits for the device.
        enabled: False leaves everything as it is, and makes the other functions do nothing.
        opt_level: "O0" to "O3". The next two options replace those of the level.
        keep_batchnorm_fp32: whether parameters of batch norm stay float32 (also "True", "False").
        loss_scale: "dynamic", or a number, also as a string. A dynamic scale starts at 2**16, is
            halved after an overflow and doubled after 2000 losses without one.
        num_losses: the number of scales, for the ``loss_id`` of :func:`scale_loss`.
        verbosity: not used; nothing is printed.
        min_loss_scale, max_loss_scale: where a dynamic scale stops.

    Returns:
        ``(models, optimizers)`` as they were given; ``models`` where ``optimizers`` is None.

    Raises:
        TypeError: ``models`` or ``optimizers`` are of another type, or a model is compiled or
            parametrized.
        RuntimeError: a model is wrapped for several devices; an optimizer was prepared before; an
            optimizer cannot have the chosen master weights.
        ValueError: an option has an impossible value, or a model has 16-bit parameters.
        Nothing has changed then.
    """
    if not enabled:
        _State.options, _State.scalers = Options(enabled=False), ()
        return models if optimizers is None else (models, optimizers)
    options = _options_of(opt_level, keep_batchnorm_fp32, loss_scale)
    model_list = _listed(models, nn.Module, "models")
    optimizer_list = [] if optimizers is None else _listed(optimizers, Optimizer, "optimizers")
    for model in model_list:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise RuntimeError(
                f"amp.initialize: models: expected one device, got a {type(model).__name__}. Wrap "
                "the model that amp.initialize returns."
            )
        casting.check_module("amp.initialize", model)
    _optimizers.check_optimizers(optimizer_list, options.has_masters)
    if not isinstance(num_losses, int) or num_losses < 1:
        raise ValueError(
            f"amp.initialize: num_losses: expected an integer of at least 1, got {num_losses!r}."
        )
    device = casting.device_type_of(model_list[0])
    scalers = tuple(
        LossScaler(device, options.loss_scale, min_loss_scale, max_loss_scale)
        for _ in range(num_losses)
    )
    for model in model_list:
        _cast_model(model, options)
        casting.give_casts(model, options.casts())
    for optimizer in optimizer_list:
        _optimizers.prepare(optimizer, options.has_masters, not scalers[0].is_one)
    _State.options, _State.scalers = options, scalers
    return models if optimizers is None else (models, optimizers)


def _options_of(level: str, keep: bool | str | None, loss_scale: float | str | None) -> Options:
    """Return the options of a level, with the overrides that are not None."""
    if level not in _LEVELS:
        expected = ", ".join(_LEVELS)
        raise ValueError(f"amp.initialize: opt_level: expected one of {expected}, got {level!r}.")
    given = {"keep_batchnorm_fp32": keep, "loss_scale": loss_scale}
    changes = {name: value for name, value in given.items() if value is not None}
    options = replace(_LEVELS[level], **changes)
    if options.keep_batchnorm_fp32 not in (True, False, "True", "False"):
        raise ValueError(
            f"amp.initialize: keep_batchnorm_fp32: expected True or False, got {keep!r}."
        )
    if options.loss_scale != "dynamic":
        options = replace(options, loss_scale=float(options.loss_scale))
        if not 0 < options.loss_scale <= torch.finfo(torch.float32).max:
            raise ValueError(
                "amp.initialize: loss_scale: expected 'dynamic' or a positive float32, got "
                f"{options.loss_scale!r}."
            )
    return options


def _listed(given: Any, kind: type, name: str) -> list[Any]:
    result = given if isinstance(given, list) else [given]
    if not all(isinstance(one, kind) for one in result) or (name == "models" and not result):
        raise TypeError(
            f"amp.initialize: {name}: expected a {kind.__module__}.{kind.__name__} or a list of "
            f"them, got {given!r}."
        )
    return result


def _cast_model(model: nn.Module, options: Options) -> None:
    """Cast parameters and buffers; the state dict stays float32."""
    dtype = options.dtype
    for module in () if dtype is None else model.modules():
        is_batchnorm = isinstance(module, _BatchNorm) and module.affine
        if not is_batchnorm or options.keep_batchnorm_fp32 in (False, "False"):
            module._apply(lambda x: x.to(dtype) if x.is_floating_point() else x, recurse=False)
        if dtype in HALVES:
            module.register_state_dict_post_hook(_save_float32)


def _save_float32(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    for key, value in state_dict.items():
        if isinstance(value, Tensor) and value.dtype in HALVES:
            state_dict[key] = value.float()


@contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Optimizer | list[Optimizer],
    loss_id: int = 0,
    model: nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Yield the scaled loss, for a call of ``backward()``.

    At the end of the context, the gradients of the optimizers are unscaled and checked, and the
    scale moves. After an overflow, the next ``step()`` of each optimizer does nothing. The
    gradients of several losses add up. The host does not wait for the device.

    Args:
        loss: of any shape.
        optimizers: optimizers of :func:`initialize`.
        loss_id: the index of a scale, below ``num_losses``.
        model, delay_unscale, delay_overflow_check: not used; the gradients of every loss are
            unscaled and checked at its end.

    Raises:
        RuntimeError: a call before :func:`initialize`; an optimizer that it has not prepared.
        IndexError: there is no such ``loss_id``.
    """
    options = _initialized("scale_loss")
    if not options.enabled:
        yield loss
        return
    optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    for optimizer in optimizers:
        if not hasattr(optimizer, "_amp_stash"):
            raise RuntimeError(
                "amp.scale_loss: optimizers: expected those of amp.initialize, got another "
                f"{type(optimizer).__name__}. Write model, optimizer = amp.initialize(model, "
                "optimizer)."
            )
    scaler = _State.scalers[loss_id]
    if scaler.is_one and not options.has_masters:
        yield loss.float()
        return
    scaled = scaler.scale(loss.float())
    for optimizer in optimizers:
        _optimizers.before_backward(optimizer)
    try:
        yield scaled
        _optimizers.after_backward(optimizers, scaler)
    except BaseException:
        for optimizer in optimizers:
            _optimizers.restore(optimizer)
        raise


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """Return the optimizer's parameters, with the gradients that the next step uses.

    After :func:`scale_loss` they are unscaled, and float32 with master weights. The masters are
    ``optimizer.state[param]["master_param"]``, from the first step on.
    """
    return params_of(optimizer)


def state_dict() -> dict[str, Any]:
    """Return the loss scales: ``{"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}}``.

    Synchronises with the device. :func:`amp_ext.compat.apex.to_grad_scaler` converts an entry.
    """
    _initialized("state_dict")
    return from_grad_scaler(*(scaler.state_dict() for scaler in _State.scalers))


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Load a result of :func:`state_dict`, or of Apex's, in its order.

    Warns if it holds another number of losses.

    Raises:
        RuntimeError: a call before :func:`initialize`.
        KeyError, TypeError, ValueError: an entry is no loss scale.
        Nothing has changed then.
    """
    _initialized("load_state_dict")
    if len(state_dict) != len(_State.scalers):
        warn(
            f"amp.load_state_dict: the state is of {len(state_dict)} losses, amp.initialize was "
            f"given num_losses={len(_State.scalers)}: the first ones are loaded"
        )
    states = [to_grad_scaler(state) for state in state_dict.values()]
    for state in states:
        GradScaler("cpu").load_state_dict(state)  # raises before anything changes
    for scaler, state in zip(_State.scalers, states, strict=False):
        scaler.load_state_dict(state)
        scaler.is_one = False


def _initialized(name: str) -> Options:
    if _State.options is None:
        raise RuntimeError(
            f"amp.{name}: call model, optimizer = amp.initialize(model, optimizer) before."
        )
    return _State.options
