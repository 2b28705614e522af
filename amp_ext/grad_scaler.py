"""Gradient scaling: ``torch.amp.GradScaler``'s interface on this package's ops."""

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.optim import Optimizer

from amp_ext._library import _C
from amp_ext._optimizer import momentum_to_come, takes_grad_scaler, zero_unwritten_momentum

_OWN_STATE = "amp_ext"


class GradScaler(torch.amp.GradScaler):
    """A drop-in for ``torch.amp.GradScaler``: same methods, same errors, same scale bit for bit.

    Args:
        device, init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch.
        allow_fp16_grads: unscale float16 gradients instead of raising ValueError.
        allow_no_grads: accept an optimizer none of whose parameters has a gradient; its step counts
            as one without overflow.
        min_scale: a backoff stops here. None stands for the smallest normal float32, 2**-126.
        max_scale: a growth stops here. None stands for no limit.
        hysteresis: how many consecutive overflows it takes before the scale backs off.

    It differs from torch where torch can fail silently:

    * the scale does not decay to 0, below which zero gradients would become NaN (``min_scale``);
    * the scale grows once the tracker has reached the interval, also when the interval was lowered;
    * an optimizer that takes ``found_inf`` gets exactly 0.0 or 1.0, also from several devices;
    * momentum buffers that a skipped first fused step leaves uninitialised are set to zero;
    * finiteness of float64 gradients is judged in float64 on every device;
    * a product that overflows its gradient's dtype counts as an overflow of the step.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        allow_fp16_grads: bool = False,
        allow_no_grads: bool = False,
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int = 1,
    ) -> None:
        _check_options(min_scale, max_scale, hysteresis)
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._allow_fp16_grads = allow_fp16_grads
        self._allow_no_grads = allow_no_grads
        self._min_scale = min_scale
        self._max_scale = max_scale
        self._hysteresis = hysteresis
        self._init_hysteresis_tracker = hysteresis
        self._init_skipped_steps = 0
        # Created on the device together with the scale.
        self._hysteresis_tracker: Tensor | None = None
        self._skipped_steps: Tensor | None = None
        self._last_found_infs: list[Tensor] = []

    def _lazy_init_scale_growth_tracker(self, dev: torch.device | str) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._skipped_steps = torch.full(
            (), self._init_skipped_steps, dtype=torch.int64, device=dev
        )
        if self._hysteresis > 1:
            self._hysteresis_tracker = torch.full(
                (), self._init_hysteresis_tracker, dtype=torch.int32, device=dev
            )

    def unscale_(self, optimizer: Optimizer) -> None:
        """As ``torch.amp.GradScaler.unscale_``."""
        if not self._enabled or self._scale is None or self._unscales_its_own_way():
            return super().unscale_(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is not OptState.READY:
            return super().unscale_(optimizer)
        per_device = _C.unscale_grads(
            optimizer.param_groups, self._scale, None, None, self._allow_fp16_grads
        )
        if per_device is None:
            return super().unscale_(optimizer)
        state["found_inf_per_device"] = self._or_no_overflow(per_device)
        state["stage"] = OptState.UNSCALED

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        groups, allow_fp16 = optimizer.param_groups, allow_fp16 or self._allow_fp16_grads
        per_device = _C.unscale_grads(groups, None, inv_scale, found_inf, allow_fp16)
        if per_device is None:
            per_device = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        return self._or_no_overflow(per_device)

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[torch.device, Tensor]:
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        if self._unscales_its_own_way():
            return super()._check_inf_per_device(optimizer)
        found_inf = torch.zeros((), dtype=torch.float32, device=scale.device)
        per_device = _C.unscale_grads(optimizer.param_groups, None, None, found_inf, True)
        if per_device is None:
            return super()._check_inf_per_device(optimizer)
        per_device = self._or_no_overflow(per_device)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = per_device
        return per_device

    def _unscales_its_own_way(self) -> bool:
        """Whether a subclass or the user has replaced ``_unscale_grads_``."""
        function = getattr(self._unscale_grads_, "__func__", None)
        return function is not GradScaler._unscale_grads_

    def _or_no_overflow(self, per_device: dict[torch.device, Tensor]) -> dict[torch.device, Tensor]:
        if per_device or not self._allow_no_grads:
            return per_device
        device = self._scale.device
        return {device: torch.zeros((), dtype=torch.float32, device=device)}

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As ``torch.amp.GradScaler.step``.

        An optimizer that unscales and skips by itself is given ``grad_scale`` and ``found_inf``,
        0-dim float32 tensors on the scale's device, which it must not write to; its step needs no
        host synchronisation. Any
        other optimizer's gradients are unscaled here, and its step is skipped after an overflow.
        """
        if not self._hands_over(optimizer, kwargs):
            return super().step(optimizer, *args, **kwargs)
        state = self._per_optimizer_states[id(optimizer)]
        unscaled = state["stage"] is OptState.UNSCALED
        if not unscaled:
            self._check_inf_per_device(optimizer)
        preset = getattr(optimizer, "grad_scale", None)
        found_inf = self._combined_found_inf(state["found_inf_per_device"].values())
        if unscaled:
            optimizer.grad_scale = preset
        else:
            optimizer.grad_scale = self._scale if preset is None else self._scale * preset
        optimizer.found_inf = found_inf
        fresh = momentum_to_come(optimizer)
        try:
            result = optimizer.step(*args, **kwargs)
        except BaseException:
            if preset is not None:
                optimizer.grad_scale = preset
            else:
                del optimizer.grad_scale
            raise
        else:
            del optimizer.grad_scale
        finally:
            del optimizer.found_inf
        zero_unwritten_momentum(optimizer, fresh, found_inf)
        state["stage"] = OptState.STEPPED
        return result

    def _hands_over(self, optimizer: Optimizer, kwargs: Mapping[str, Any]) -> bool:
        """Whether ``optimizer`` takes ``grad_scale`` and ``found_inf``, and may be stepped now."""
        if not (
            self._enabled
            and getattr(optimizer, "_step_supports_amp_scaling", False)
            and not takes_grad_scaler(optimizer.step)
            and "closure" not in kwargs
            and self._scale is not None
        ):
            return False
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.UNSCALED:
            return bool(state["found_inf_per_device"])
        return state["stage"] is OptState.READY

    def _combined_found_inf(self, found_infs: Iterable[Tensor]) -> Tensor:
        device = self._scale.device
        lazy = device.type != "cpu"  # a copy to the CPU must have arrived before it is read
        found_infs = [found.to(device, non_blocking=lazy) for found in found_infs]
        if not found_infs:
            return torch.zeros((), dtype=torch.float32, device=device)
        return functools.reduce(torch.maximum, found_infs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """As ``torch.amp.GradScaler.update``, with this class's options, and without a host
        synchronisation."""
        if not self._enabled:
            return
        found_infs = [
            found
            for state in self._per_optimizer_states.values()
            for found in state["found_inf_per_device"].values()
        ]
        if new_scale is not None or self._scale is None or not found_infs:
            super().update(new_scale)
            if self._skipped_steps is not None:
                self._skipped_steps += self._combined_found_inf(found_infs).long()
        else:
            _C.update_scale(
                self._scale,
                self._growth_tracker,
                found_infs,
                self._growth_factor,
                self._backoff_factor,
                self._growth_interval,
                self._min_scale,
                self._max_scale,
                self._hysteresis,
                self._hysteresis_tracker,
                self._skipped_steps,
            )
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self._last_found_infs = found_infs

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last :meth:`update` closed a step with an overflow. Synchronises with the
        device when it is read, not before."""
        return any(found.item() for found in self._last_found_infs)

    def get_skipped_steps(self) -> int:
        """Number of calls of :meth:`update` that saw an overflow. Synchronises with the device."""
        if self._skipped_steps is None:
            return self._init_skipped_steps
        return int(self._skipped_steps.item())

    def _get_hysteresis_tracker(self) -> int:
        if self._hysteresis_tracker is None:
            return self._init_hysteresis_tracker
        return int(self._hysteresis_tracker.item())

    def state_dict(self) -> dict[str, Any]:
        """torch's five entries, and one named ``"amp_ext"``, which torch ignores, with the counters
        ``skipped_steps`` and ``hysteresis_tracker`` (of ``hysteresis``). Empty when disabled."""
        state = super().state_dict()
        if state:
            state[_OWN_STATE] = {
                "skipped_steps": self.get_skipped_steps(),
                "hysteresis": self._hysteresis,
                "hysteresis_tracker": self._get_hysteresis_tracker(),
            }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this class or of ``torch.amp.GradScaler``.

        Counters that it lacks start anew, as does the hysteresis tracker of another ``hysteresis``.
        Raises KeyError, ValueError or TypeError before anything changes.
        """
        if not self._enabled:
            return
        if state_dict:
            state_dict = {**state_dict, **_checked_state(state_dict)}
        own = state_dict.get(_OWN_STATE, {})
        if not isinstance(own, Mapping):
            raise TypeError(
                f"GradScaler.load_state_dict: {_OWN_STATE!r} must hold a dict, got {own!r}"
            )
        own = {key: _checked_integer(key, value, 63) for key, value in own.items()}
        tracker = self._hysteresis
        if own.get("hysteresis") == self._hysteresis:
            tracker = min(own.get("hysteresis_tracker", tracker), tracker)
        super().load_state_dict(state_dict)
        self._init_skipped_steps = own.get("skipped_steps", 0)
        self._init_hysteresis_tracker = tracker
        if self._skipped_steps is not None:
            self._skipped_steps.fill_(self._init_skipped_steps)
        if self._hysteresis_tracker is not None:
            self._hysteresis_tracker.fill_(self._init_hysteresis_tracker)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state["_init_skipped_steps"] = self.get_skipped_steps()
        state["_init_hysteresis_tracker"] = self._get_hysteresis_tracker()
        state["_skipped_steps"] = state["_hysteresis_tracker"] = None
        state["_last_found_infs"] = []
        return state


def _checked_integer(key: str, value: Any, bits: int) -> int:
    if int(value) != value or not -(2**bits) <= value < 2**bits:
        raise ValueError(
            f"GradScaler.load_state_dict: {key!r} must be an integer of {bits + 1} bits, "
            f"got {value!r}"
        )
    return int(value)


def _checked_state(state: Mapping[str, Any]) -> dict[str, float | int]:
    """torch's entries as the numbers that they stand for."""
    factors = ("scale", "growth_factor", "backoff_factor")
    return {
        **{key: float(state[key]) for key in factors},
        "growth_interval": _checked_integer("growth_interval", state["growth_interval"], 63),
        "_growth_tracker": _checked_integer("_growth_tracker", state["_growth_tracker"], 31),
    }


def _check_options(min_scale: float | None, max_scale: float | None, hysteresis: int) -> None:
    if min_scale is not None and not 0 <= min_scale <= torch.finfo(torch.float32).max:
        raise ValueError(
            f"GradScaler: min_scale must be a finite float32, not negative, got {min_scale}"
        )
    if max_scale is not None and not max_scale > 0:
        raise ValueError(f"GradScaler: max_scale must be positive, got {max_scale}")
    if min_scale is not None and max_scale is not None and min_scale > max_scale:
        raise ValueError(
            f"GradScaler: min_scale must be at most max_scale, got {min_scale} and {max_scale}"
        )
    if not isinstance(hysteresis, int) or not 1 <= hysteresis < 2**31:
        raise ValueError(
            f"GradScaler: hysteresis must be an integer from 1 to 2**31 - 1, got {hysteresis!r}"
        )
