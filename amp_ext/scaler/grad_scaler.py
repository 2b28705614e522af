"""The scaler: which gradients are unscaled, clipped and checked when, and what a step is given."""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.optim import Optimizer

from amp_ext._library import _C
from amp_ext.optim._scalars import StepScalars
from amp_ext.optim._step import KernelStep
from amp_ext.scaler.clip import SCALED, UNSCALED, Clip, check_unsplit, clip_as_torch
from amp_ext.scaler.optimizers import (
    Handover,
    handover_of,
    momentum_to_come,
    takes_scaler,
    zero_unwritten_momentum,
)
from amp_ext.scaler.parameters import (
    OrParameters,
    Parameters,
    by_id,
    combined,
    params_of,
    unscaled_with,
)
from amp_ext.scaler.processes import Reduction, is_flattened, several
from amp_ext.scaler.report import found_infs_of
from amp_ext.scaler.state import ScalerState, skips_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_NO_CHECKS = (
    "No inf checks were recorded for this optimizer. None of its parameters had a gradient when it "
    "was checked: usually it was given other parameters than those of the model that was trained, "
    "or zero_grad() came between backward() and step(). If steps without gradients are meant, "
    "construct the scaler with allow_no_grads=True"
)

_HOST_METHODS = ("unscale_", "_unscale_grads_", "_maybe_opt_step")
"""Methods that torch's scaler calls for a step on the host, and that users override."""


class GradScaler(ScalerState):
    """A drop-in for ``torch.amp.GradScaler``: same methods, same errors, same scale bit for bit.

    Args:
        device, init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch.
        allow_fp16_grads: unscale float16 gradients instead of raising ValueError.
        allow_no_grads: accept an optimizer none of whose parameters has a gradient; its step counts
            as one without overflow.
        min_scale: a backoff stops here. None stands for the smallest normal float32, 2**-126.
        max_scale: a growth stops here. None stands for no limit.
        hysteresis: how many consecutive overflows it takes before the scale backs off; each that
            follows backs off again.
        dynamic: False for a scale that stays at ``init_scale``, or where it is set. With one of 1.0
            this is a guard for bfloat16 that skips steps whose gradients are not finite and writes
            no gradient.
        max_consecutive_skips: so many steps skipped in a row are an error, raised where the host
            next reads something of the scaler, as ``step_was_skipped``; nothing waits for it.
        skip_above_norm: a step is skipped, and counted as skipped, where ``clip_grad_norm_``
            returns more than this; the scale does not back off. None stands for no limit.
        process_group: the processes of ``torch.distributed`` that skip steps together where the
            parameters do not show it, as those of a pipeline; and those that have parts of FSDP1's
            parameters, as for ``ShardedGradScaler`` (None stands for all processes). DTensors show
            their meshes, and DDP has the same gradients everywhere: they need none.

    Raises:
        ValueError: a negative or infinite ``min_scale``, a ``max_scale`` that is not positive or
            below ``min_scale``, a ``hysteresis`` or ``max_consecutive_skips`` that is not an
            integer from 1 to 2**31 - 1, a ``skip_above_norm`` that is not positive.

    It differs from torch where torch can fail silently:

    * the scale does not decay to 0, below which zero gradients would become NaN (``min_scale``);
    * the scale grows once the tracker has reached the interval, also when the interval was lowered;
    * an optimizer that takes ``found_inf`` gets exactly 0.0 or 1.0, also from several devices;
    * momentum buffers that a skipped first fused step leaves uninitialised are set to zero;
    * float64 gradients are checked in float64 on every device;
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
        dynamic: bool = True,
        max_consecutive_skips: int | None = None,
        skip_above_norm: float | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            device,
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            enabled,
            min_scale=min_scale,
            max_scale=max_scale,
            hysteresis=hysteresis,
            max_consecutive_skips=max_consecutive_skips,
            skip_above_norm=skip_above_norm,
        )
        self.process_group = process_group
        self._dynamic = dynamic
        self._allow_fp16_grads = allow_fp16_grads
        self._allow_no_grads = allow_no_grads

    def unscale_(self, optimizer: Optimizer) -> None:
        """As ``torch.amp.GradScaler.unscale_``."""
        if not self._enabled or self._scale is None:
            return super().unscale_(optimizer)
        ready = self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
        state = self._state_of(optimizer)
        if ready and state["stage"] is OptState.UNSCALED:
            return None
        if state.get("clip") and state["clip"].scaled:
            raise RuntimeError(
                "unscale_() is being called after clip_grad_norm_(), which has left unscaling to "
                "step(): call it before."
            )
        if state["stage"] is not OptState.READY or self._has_own("_unscale_grads_"):
            return super().unscale_(optimizer)
        numbers = self._step_numbers()
        found_inf = numbers.offer()
        found_infs = _C.unscale_grads(
            optimizer.param_groups,
            numbers.inv_scale,
            found_inf,
            self._allow_fp16_grads,
            self._reduction(optimizer),
        )
        numbers.settle(found_inf, found_infs)
        if found_infs is None:
            return super().unscale_(optimizer)
        state["found_inf_per_device"] = self._or_no_overflow(found_infs)
        state["stage"] = OptState.UNSCALED

    def clip_grad_norm_(
        self,
        optimizer_or_parameters: OrParameters,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """``unscale_`` and ``torch.nn.utils.clip_grad_norm_`` in one: a pass that only reads the
        gradients, for the overflow check and their L2 norm. Then, given an optimizer,

        * an optimizer of :mod:`amp_ext.optim` (unless its step is overridden, wrapped or hooked),
          or one that takes ``grad_scale`` and ``found_inf`` (``fused=True``), unscales and clips in
          its own step. Until then ``.grad`` stays as it is, scaled and unclipped;
        * any other's gradients are rewritten here, where that changes them.

        To be called once before :meth:`step`, in the place of :meth:`unscale_` or after it; then it
        only clips. To see unscaled gradients, call :meth:`unscale_` first. When the norm is not
        finite, gradients stay as they are and :meth:`step` skips the optimizer's step. A float16
        gradient that overflows float16 only when it is unscaled does not make the norm infinite:
        the check sees it clipped.

        An optimizer that takes ``grad_scale`` is given the scale divided by the clip coefficient;
        where that is beyond float32, gradients become 0.

        Parameters, such as ``model.parameters()``, have their gradients rewritten here, whoever
        steps them: :meth:`step` and :meth:`unscale_` of their optimizers, one or several, unscale
        what gradients are left, and skip after an overflow here. They may be given in several
        parts, each clipped to its own norm.

        Args:
            optimizer_or_parameters: an optimizer, a tensor or an iterable of tensors; the norm is
                that of all of their gradients together, sparse ones too, and of all processes that
                have parts of DTensors or of FSDP1's parameters.
            max_norm: what the norm is clipped to.
            norm_type: the order of the norm. With another than 2, ``inf`` included, gradients are
                unscaled here and clipped by torch's code, as after :meth:`unscale_`.
            error_if_nonfinite: raise for a norm that is not finite. Synchronises with the device;
                otherwise nothing does.

        Returns:
            The norm of the unscaled gradients before clipping, a 0-dim float32 tensor on the
            scale's device, which the step reads: write to a clone only, as in ``all_reduce``. After
            an overflow it is inf or NaN. A disabled scaler, and gradients that are
            tensor subclasses, go torch's way and return what torch returns, a DTensor as a whole.

        Raises:
            TypeError: neither an optimizer nor parameters.
            ValueError: ``max_norm`` is negative or NaN, or as :meth:`unscale_` for float16
                gradients that would be rewritten.
            RuntimeError: a second call for an optimizer before :meth:`update`, or one after
                :meth:`step`; a norm that is not finite with ``error_if_nonfinite``; parameters that
                FSDP1 has split, with another ``norm_type`` or a disabled scaler, and those of its
                NO_SHARD, which its own ``clip_grad_norm_`` clips.
                Nothing has been written then, unless gradients went torch's way, or some of the
                parameters had been unscaled before: they are unscaled.
        """
        optimizer = optimizer_or_parameters
        if not hasattr(optimizer, "param_groups"):
            optimizer = Parameters(optimizer_or_parameters)
        if not self._enabled or float(norm_type) != 2.0:
            check_unsplit(optimizer)
        if not self._enabled:
            return clip_as_torch(optimizer, max_norm, norm_type, error_if_nonfinite)
        if not float(max_norm) >= 0:
            raise ValueError(
                "GradScaler.clip_grad_norm_: max_norm must be a number that is not negative, "
                f"got {max_norm}"
            )
        self._check_scale_growth_tracker("clip_grad_norm_")
        state = self._state_of(optimizer)
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("clip_grad_norm_() is being called after step().")
        if "clip" in state:
            raise RuntimeError(
                "clip_grad_norm_() has already been called on this optimizer since the last "
                "update()."
            )
        replaced = self._has_own("unscale_") or self._has_own("_unscale_grads_")
        if replaced and state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        unscaled = state["stage"] is OptState.UNSCALED
        numbers = self._step_numbers()
        by_ours = float(norm_type) == 2.0
        # With an error, what has been found must not stay.
        may_stay = by_ours and not unscaled and not error_if_nonfinite
        found_inf = numbers.offer() if may_stay else None
        handover = self._handover(optimizer) if by_ours else Handover.HOST
        by_step, clipped = handover is not Handover.HOST, None
        across = self._reduction(optimizer)
        if by_ours:
            clipped = _C.clip_grads(
                optimizer.param_groups,
                numbers.inv_scale,
                found_inf,
                state["found_inf_per_device"] if unscaled else None,
                None if by_step else float(max_norm),
                error_if_nonfinite,
                by_step or unscaled or self._allow_fp16_grads,
                handover is not Handover.KERNELS,
                across,
            )
        found_infs, norm = clipped or (None, None)
        numbers.settle(found_inf, found_infs)
        if clipped is None:
            if not unscaled:
                self.unscale_(optimizer)
            norm = clip_as_torch(optimizer, max_norm, norm_type, error_if_nonfinite)
            state["clip"] = None
        else:
            if unscaled:
                found_infs = {**state["found_inf_per_device"], **found_infs}
            state["found_inf_per_device"] = self._or_no_overflow(found_infs)
            state["stage"] = OptState.UNSCALED
            state["clip"] = Clip(
                norm, float(max_norm), handover, by_step and not unscaled, norm._version
            )
        if self._skip_above_norm is not None:
            state["too_long"] = (norm.to(self._scale) > self._skip_above_norm).float()
            if across is not None and not (self.process_group is None and across.norm_is_common):
                across.share(state["too_long"])
        if isinstance(optimizer, Parameters):
            optimizer.note_unscaled()
        for its in state.get("of", ()):  # they have one norm, and are skipped together
            its |= combined([state])
        return norm

    def _state_of(self, optimizer: Optimizer | Parameters) -> dict[str, Any]:
        """That of this step. Where some of its gradients have been unscaled already, without the
        optimizer or, if these are parameters, with theirs, the others are unscaled now."""
        alone = isinstance(optimizer, Parameters)
        if alone:  # nobody else refers to them; a report takes names from optimizers that follow
            self._optimizers = {id(optimizer): lambda: optimizer} | self._optimizers
        state = super()._state_of(optimizer)
        if state["stage"] is not OptState.READY:
            return state
        others = [other for find in self._optimizers.values() if (other := find()) is not None]
        others = [other for other in others if alone or isinstance(other, Parameters)]
        left = by_id(optimizer) if others else {}
        shared = []
        for other in others:
            its, its_params = self._per_optimizer_states[id(other)], unscaled_with(other)
            if its["stage"] is OptState.READY or left.keys().isdisjoint(its_params):
                continue
            if its["stage"] is OptState.STEPPED:
                raise RuntimeError("clip_grad_norm_() is being called after step().")
            if its.get("clip") and its["clip"].by_step:
                raise RuntimeError(
                    "clip_grad_norm_() has already been called on an optimizer of these parameters "
                    "since the last update(), and has left clipping to its step()."
                )
            shared.append((its, its_params))
        for _, its_params in shared:
            left = {key: param for key, param in left.items() if key not in its_params}
        if not several():  # other processes may have gradients that this one has not
            left = {key: param for key, param in left.items() if param.grad is not None}
        if shared and left:
            rest = Parameters(left.values())
            self.unscale_(rest)
            rest.note_unscaled()
            shared.append((self._per_optimizer_states[id(rest)], left))
        if shared:
            states = [its for its, _ in shared]
            state |= {"stage": OptState.UNSCALED, "of": states} | combined(states)
        return state

    def _found_inf_per_device(self, optimizer: Optimizer) -> dict[torch.device, Tensor]:
        return self._state_of(optimizer)["found_inf_per_device"]

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True
    ) -> dict[torch.device, Tensor]:
        groups, allow_fp16 = optimizer.param_groups, allow_fp16 or self._allow_fp16_grads
        across = self._reduction(optimizer)
        found_infs = _C.unscale_grads_by(groups, inv_scale, found_inf, allow_fp16, across)
        if found_infs is None:  # torch reduces over the meshes of DTensors
            found_infs = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
            if across is not None:
                flattened = any(map(is_flattened, params_of(optimizer)))
                across(found_infs, ["fsdp" if flattened else None], None)
        return self._or_no_overflow(found_infs)

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[torch.device, Tensor]:
        self._check_scale_growth_tracker("_check_inf_per_device")
        state = self._state_of(optimizer)
        if self._has_own("_unscale_grads_"):
            return super()._check_inf_per_device(optimizer)
        self._check(optimizer, written=True)
        return state["found_inf_per_device"]

    def _check(self, optimizer: Optimizer, written: bool) -> None:
        """Check the gradients for a step, which may write them."""
        numbers = self._step_numbers()
        found_inf = numbers.offer()
        found_infs = _C.check_grads(
            optimizer.param_groups, found_inf, written, self._reduction(optimizer)
        )
        numbers.settle(found_inf, found_infs)
        if found_infs is None:
            super()._check_inf_per_device(optimizer)
        else:
            self._state_of(optimizer)["found_inf_per_device"] = self._or_no_overflow(found_infs)

    def _reduction(self, optimizer: Optimizer | Parameters) -> Reduction | None:
        return Reduction(self._scale, self.process_group, optimizer) if several() else None

    def _has_own(self, name: str) -> bool:
        """Whether a subclass or the user has put another method in the place of ours."""
        return getattr(getattr(self, name), "__func__", None) is not getattr(GradScaler, name)

    def _or_no_overflow(self, found_infs: dict[torch.device, Tensor]) -> dict[torch.device, Tensor]:
        if found_infs or not self._allow_no_grads:
            return found_infs
        return {self._scale.device: self._combined_found_inf([])}

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As ``torch.amp.GradScaler.step``.

        An optimizer that unscales and skips by itself is given ``grad_scale`` and ``found_inf``,
        0-dim float32 tensors on the scale's device, which it must not write to; its step needs no
        host synchronisation. They hold for this step alone: :meth:`update` makes the same memory
        ready for the next. Any other optimizer's gradients are unscaled here, and its step is
        skipped after an overflow. An optimizer of :mod:`amp_ext.optim` is treated so where its step
        is overridden, wrapped or hooked.

        Clears autocast's cached copies of weights, torch's included.
        """
        try:
            if not self._enabled or self._scale is None or "closure" in kwargs:
                return super().step(optimizer, *args, **kwargs)
            state = self._state_of(optimizer)
            if state["stage"] is OptState.STEPPED or takes_scaler(optimizer):
                return super().step(optimizer, *args, **kwargs)
            handover = self._handover_of_step(optimizer, state)
            if state["stage"] is OptState.READY:
                if handover is Handover.HOST:
                    self.unscale_(optimizer)
                elif handover is Handover.KERNELS and not self._has_own("_check_inf_per_device"):
                    self._check(optimizer, written=False)
                else:
                    self._check_inf_per_device(optimizer)
            elif handover is Handover.FOUND_INF and not state["found_inf_per_device"]:
                return super().step(optimizer, *args, **kwargs)
            if handover is Handover.FOUND_INF:
                result = self._step_with_found_inf(optimizer, state, *args, **kwargs)
            elif not state["found_inf_per_device"]:
                raise AssertionError(_NO_CHECKS)
            elif handover is Handover.KERNELS:
                result = self._step_with_scalars(optimizer, state, *args, **kwargs)
            else:
                result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
            if isinstance(optimizer, KernelStep):
                vars(optimizer).pop("grad_scale", None)  # a user's, for this step alone
            state["stage"] = OptState.STEPPED
            return result
        finally:
            # Fused steps write weights without bumping their version, by which copies are checked.
            torch.clear_autocast_cache()

    def _handover(self, optimizer: Optimizer | Parameters) -> Handover:
        """Return the hand-over to an optimizer, which overridden methods of ours keep here."""
        if isinstance(optimizer, KernelStep) and any(map(self._has_own, _HOST_METHODS)):
            return Handover.HOST
        return handover_of(optimizer)

    def _handover_of_step(self, optimizer: Optimizer, state: dict[str, Any]) -> Handover:
        clip = state.get("clip")
        if not clip or not clip.by_step:
            return self._handover(optimizer)
        if isinstance(optimizer, KernelStep) and optimizer._is_observed:
            raise RuntimeError(
                "GradScaler.step: optimizer: expected the step() to which clip_grad_norm_() has "
                "left unscaling and clipping, got one that is wrapped or hooked since. Wrap it "
                "before clip_grad_norm_()."
            )
        return clip.handover

    def _step_with_scalars(
        self, optimizer: Optimizer, state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        clip = self._clip_of_step(state)
        optimizer._step_scalars = StepScalars(
            self._combined_found_inf(skips_of(state)),
            self._step_numbers().inv_scale if clip.scaled else None,
            *((clip.norm, clip.max_norm) if clip.by_step else (None, None)),
        )
        try:
            result = optimizer.step(*args, **kwargs)
        finally:
            del optimizer._step_scalars
        return result

    def _clip_of_step(self, state: dict[str, Any]) -> Clip:
        """What is left to do for the step of an optimizer, whose gradients have been checked."""
        if state["stage"] is OptState.READY:
            return SCALED
        clip = state.get("clip") or UNSCALED
        if clip.norm is not None and clip.norm._version != clip.version:
            raise RuntimeError(
                "The norm that clip_grad_norm_() returned has been written in place before step(), "
                "which reads it: write to a clone() of it."
            )
        return clip

    def _step_with_found_inf(
        self, optimizer: Optimizer, state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        clip = self._clip_of_step(state)
        preset = getattr(optimizer, "grad_scale", None)
        found_inf = self._combined_found_inf(skips_of(state))
        divisors = [self._scale] if clip.scaled else []
        if clip.by_step:
            divisors.append(clip.inverse_coefficient())
        if preset is not None:
            divisors.append(preset)
        optimizer.grad_scale = functools.reduce(operator.mul, divisors) if divisors else None
        optimizer.found_inf = found_inf
        fresh = momentum_to_come(optimizer)
        try:
            result = optimizer.step(*args, **kwargs)
            preset = None  # it has been used
        finally:
            del optimizer.grad_scale, optimizer.found_inf
            if preset is not None:
                optimizer.grad_scale = preset
        zero_unwritten_momentum(optimizer, fresh, found_inf)
        return result

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        skipped = any(flag.item() for flag in skips_of(optimizer_state))
        optimizer_state["skipped"] = skipped
        return None if skipped else optimizer.step(*args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """As ``torch.amp.GradScaler.update``, with this class's options, and never waiting."""
        if not self._enabled:
            return
        states = self._per_optimizer_states
        found_infs = found_infs_of(states.values())
        too_long = [state["too_long"] for state in states.values() if "too_long" in state]
        more = None  # steps that are skipped without an overflow
        if too_long:
            overflow = self._combined_found_inf(found_infs)
            more = (self._combined_found_inf(too_long) > overflow).long()
        is_skipped = None
        if self._consecutive_skips is not None and found_infs:
            is_skipped = self._combined_found_inf([*found_infs, *too_long]) != 0
        if new_scale is not None or self._scale is None or not found_infs:
            super().update(new_scale)
            if self._skipped_steps is not None:
                self._skipped_steps += self._combined_found_inf(found_infs).long()
            ready = False
        else:
            _C.update_scale(
                self._scale,
                self._growth_tracker,
                found_infs,
                self._growth_factor if self._dynamic else 1.0,
                self._backoff_factor if self._dynamic else 1.0,
                self._growth_interval,
                self._min_scale,
                self._max_scale,
                self._hysteresis,
                self._hysteresis_tracker,
                self._skipped_steps,
                self._step_numbers().next_step,
            )
            ready = True
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        if more is not None:
            self._skipped_steps += more
        if is_skipped is not None:
            self._consecutive_skips.add_(1).mul_(is_skipped)
        self._close_step(states, ready)
