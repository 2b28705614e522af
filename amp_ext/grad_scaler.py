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
from amp_ext._optimizer import (
    clip_as_torch,
    momentum_to_come,
    takes_grad_scaler,
    zero_unwritten_momentum,
)
from amp_ext._scaler_checks import check_may_clip, check_options, checked_max_norm, replaces
from amp_ext._scaler_state import ScalerState
from amp_ext.report import found_infs_of


class GradScaler(ScalerState):
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
        check_options(min_scale, max_scale, hysteresis)
        super().__init__(
            device,
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            enabled,
            hysteresis=hysteresis,
        )
        self._allow_fp16_grads = allow_fp16_grads
        self._allow_no_grads = allow_no_grads
        self._min_scale = min_scale
        self._max_scale = max_scale

    def unscale_(self, optimizer: Optimizer) -> None:
        """As ``torch.amp.GradScaler.unscale_``."""
        if not self._enabled or self._scale is None:
            return super().unscale_(optimizer)
        state = self._note(optimizer)
        if state["stage"] is not OptState.READY or self._unscales_its_own_way():
            return super().unscale_(optimizer)
        per_device = _C.unscale_grads(
            optimizer.param_groups, self._scale, None, None, self._allow_fp16_grads
        )
        if per_device is None:
            return super().unscale_(optimizer)
        state["found_inf_per_device"] = self._or_no_overflow(per_device)
        state["stage"] = OptState.UNSCALED

    def clip_grad_norm_(
        self, optimizer: Optimizer, max_norm: float, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """``unscale_`` and ``torch.nn.utils.clip_grad_norm_`` in one: a pass that only reads the
        gradients, for the overflow check and their L2 norm, and one that writes them where that
        changes them.

        To be called once before :meth:`step`, in the place of :meth:`unscale_` or after it; then it
        only clips. When the norm is not finite, gradients stay as they are, scaled and unclipped,
        and :meth:`step` skips the optimizer's step. A float16 gradient that overflows float16 only
        when it is unscaled does not make the norm infinite: it is judged clipped.

        Args:
            optimizer: the norm is that of all of its gradients together, sparse ones too.
            max_norm: what the norm is clipped to.
            error_if_nonfinite: raise for a norm that is not finite. Synchronises with the device;
                otherwise nothing does.

        Returns:
            The norm of the unscaled gradients before clipping, a 0-dim float32 tensor on the
            scale's device; after an overflow inf or NaN. A disabled scaler, and gradients that only
            Python can serve, go torch's way and return what torch returns.

        Raises:
            ValueError: ``max_norm`` is negative or NaN, or as :meth:`unscale_` for float16.
            RuntimeError: a second call before :meth:`update` or one after :meth:`step`; a norm that
                is not finite with ``error_if_nonfinite``. Nothing has been written then, unless
                gradients went torch's way: they are unscaled.
        """
        if not self._enabled:
            return clip_as_torch(optimizer, max_norm, error_if_nonfinite)
        max_norm = checked_max_norm(max_norm)
        scale, _ = self._check_scale_growth_tracker("clip_grad_norm_")
        state = self._note(optimizer)
        check_may_clip(state)
        replaced = replaces(self.unscale_, GradScaler.unscale_) or self._unscales_its_own_way()
        if replaced and state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        unscaled = state["stage"] is OptState.UNSCALED
        clipped = _C.clip_grads(
            optimizer.param_groups,
            scale,
            unscaled,
            state["found_inf_per_device"] if unscaled else {},
            max_norm,
            error_if_nonfinite,
            unscaled or self._allow_fp16_grads,
        )
        if clipped is None:
            if not unscaled:
                self.unscale_(optimizer)
            norm = clip_as_torch(optimizer, max_norm, error_if_nonfinite)
        else:
            found_infs, norm = clipped
            if unscaled:
                found_infs = {**state["found_inf_per_device"], **found_infs}
            state["found_inf_per_device"] = self._or_no_overflow(found_infs)
            state["stage"] = OptState.UNSCALED
        state["clipped"] = True
        return norm

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
        state = self._note(optimizer)
        if self._unscales_its_own_way():
            return super()._check_inf_per_device(optimizer)
        found_inf = torch.zeros((), dtype=torch.float32, device=scale.device)
        per_device = _C.check_grads(optimizer.param_groups, found_inf)
        if per_device is None:
            return super()._check_inf_per_device(optimizer)
        state["found_inf_per_device"] = self._or_no_overflow(per_device)
        return state["found_inf_per_device"]

    def _note(self, optimizer: Optimizer) -> dict[str, Any]:
        """Notes that the optimizer's gradients are about to be read; returns its state."""
        self._log.note(optimizer)
        return self._per_optimizer_states[id(optimizer)]

    def _unscales_its_own_way(self) -> bool:
        return replaces(self._unscale_grads_, GradScaler._unscale_grads_)

    def _or_no_overflow(self, per_device: dict[torch.device, Tensor]) -> dict[torch.device, Tensor]:
        if per_device or not self._allow_no_grads:
            return per_device
        device = self._scale.device
        return {device: torch.zeros((), dtype=torch.float32, device=device)}

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As ``torch.amp.GradScaler.step``.

        An optimizer that unscales and skips by itself is given ``grad_scale`` and ``found_inf``,
        0-dim float32 tensors on the scale's device, which it must not write to; its step needs no
        host synchronisation. Any other optimizer's gradients are unscaled here, and its step is
        skipped after an overflow.

        Clears autocast's cached copies of weights, torch's included.
        """
        self._log.note(optimizer)
        try:
            if self._hands_over(optimizer, kwargs):
                return self._step_with_found_inf(optimizer, *args, **kwargs)
            return super().step(optimizer, *args, **kwargs)
        finally:
            # Fused steps write to weights without a new version, which autocast's copies go by.
            torch.clear_autocast_cache()

    def _step_with_found_inf(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
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
        """As ``torch.amp.GradScaler.update``, with this class's options, and never waiting."""
        if not self._enabled:
            return
        states = self._per_optimizer_states
        found_infs = found_infs_of(states.values())
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
        self._log.close_step(states)
