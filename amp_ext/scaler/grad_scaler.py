"""Scale losses: passes over gradients, the hand-over of a step, and the update of the scale.

scaler.step() checks gradients that no pass has checked, and hands the step over to the optimizer.
The hand-over depends on the optimizer:

=========  =============================  ===================  =================================
Handover   optimizers                     unscaled by          after an overflow
=========  =============================  ===================  =================================
KERNELS    :mod:`amp_ext.optim`           optimizer.step()     optimizer.step() runs; its kernels
                                                               write nothing
FOUND_INF  ``fused=True``, and others     optimizer.step()     optimizer.step() runs, and writes
           that take ``found_inf``                             nothing
HOST       all others, such as torch's    ``unscale_``,        optimizer.step() is not called
           unfused SGD                    ``clip_grad_norm_``
                                          or scaler.step()
=========  =============================  ===================  =================================

HOST also serves optimizers of :mod:`amp_ext.optim` whose step is overridden, wrapped or hooked, or
whose scaler overrides ``unscale_``, ``_unscale_grads_`` or ``_maybe_opt_step``: other code sees
unscaled gradients.

``clip_grad_norm_`` leaves ``.grad`` scaled and unclipped for a step that unscales; after
``unscale_``, unscaled and unclipped. With HOST it leaves ``.grad`` unscaled and clipped. Clips of
parameters, other norm types and tensor subclasses rewrite ``.grad`` at once, whoever steps.

The host waits for the device in scaler.step() with HOST, to decide on optimizer.step(). It also
waits where users read: ``step_was_skipped``, ``get_scale``, ``get_skipped_steps``, ``state_dict``,
``overflow_report`` and ``error_if_nonfinite``, and in pickling and ``load_state_dict``. It waits
nowhere else.
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp import GradScaler as TorchsScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from amp_ext._library import _C
from amp_ext._warnings import torchs_warnings
from amp_ext.optim._scalars import StepScalars
from amp_ext.optim._step import KernelStep
from amp_ext.scaler.checkpoint import check_bounds, checked_count
from amp_ext.scaler.optimizers import (
    Handover,
    handover_of,
    params_without_momentum,
    takes_scaler,
    zero_unwritten_momentum,
)
from amp_ext.scaler.parameters import OrParameters, Parameters, UnscaledGrads, params_of
from amp_ext.scaler.processes import (
    Reduction,
    check_not_split,
    clip_as_torch,
    is_distributed,
    is_flattened,
)
from amp_ext.scaler.state import ScalerState
from amp_ext.scaler.step_state import StepState

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_NO_CHECKS = (
    "No inf checks were recorded for this optimizer. None of its parameters had a gradient when it "
    "was checked: usually it was given other parameters than those of the model that was trained, "
    "or zero_grad() came between backward() and step(). If steps without gradients are meant, "
    "construct the scaler with allow_no_grads=True"
)


class GradScaler(ScalerState):
    """Replace ``torch.amp.GradScaler``: same methods, same errors, same scale bit for bit.

    Args:
        device, init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch.
        allow_fp16_grads: unscale float16 gradients instead of raising ValueError.
        allow_no_grads: accept an optimizer without any gradients; its step has no overflow.
        min_scale: a backoff stops here. None stands for the smallest normal float32, 2**-126.
        max_scale: a growth stops here. None stands for no limit.
        hysteresis: the number of consecutive overflows before the scale backs off; each overflow
            after them backs off again.
        dynamic: False for a scale that only users move. With an ``init_scale`` of 1.0, such a
            scaler skips bfloat16 steps with an overflow, and writes no gradient.
        max_consecutive_skips: so many skipped steps in a row raise an error at the next read, such
            as ``step_was_skipped``; nothing waits for it.
        skip_above_norm: skip steps with a larger norm from ``clip_grad_norm_``; the scale does not
            back off. None stands for no limit.
        process_group: processes of ``torch.distributed`` that skip steps together although their
            parameters do not show it, as in pipelines; and the processes of FSDP1's parameters,
            where None stands for all. DTensors and DDP need none.

    Raises:
        ValueError: ``min_scale`` is negative or infinite. ``max_scale`` is not positive, or is
            below ``min_scale``. ``hysteresis`` or ``max_consecutive_skips`` is not an integer from
            1 to 2**31 - 1. ``skip_above_norm`` is not positive.

    It differs from torch where torch can fail silently:

    * The scale does not decay to 0 (``min_scale``). The reciprocal of 0 makes zero gradients NaN.
    * The scale grows once the tracker has reached the interval, also when the interval was lowered.
    * An optimizer that takes ``found_inf`` gets exactly 0.0 or 1.0, also from several devices.
    * Momentum buffers that a skipped first fused step leaves uninitialised are set to zero.
    * float64 gradients are checked in float64 on every device.
    * A product that overflows its gradient's dtype counts as an overflow of the step.
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
        # super() is wrong: the base of amp_ext.cuda.amp's scaler has torch.cuda.amp's arguments.
        with torchs_warnings():
            TorchsScaler.__init__(
                self, device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
            )
        check_bounds(min_scale, max_scale, skip_above_norm)
        if max_consecutive_skips is not None:
            max_consecutive_skips = checked_count("max_consecutive_skips", max_consecutive_skips)
        if self._enabled:
            self.set_growth_interval(self._growth_interval)
        self.process_group = process_group
        self._dynamic = dynamic
        self._min_scale, self._max_scale = min_scale, max_scale
        self._hysteresis = checked_count("hysteresis", hysteresis)
        self._max_consecutive_skips = max_consecutive_skips
        self._skip_above_norm = skip_above_norm
        self._allow_fp16_grads = allow_fp16_grads
        self._allow_no_grads = allow_no_grads
        self._per_optimizer_states = defaultdict(StepState)
        self._init_state()

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale an optimizer's gradients, as ``torch.amp.GradScaler.unscale_`` does.

        The pass also checks the gradients, whoever steps later. The host does not wait.
        """
        if not self._enabled or self._scale is None:
            return super().unscale_(optimizer)
        was_ready = self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
        state = self._state_of(optimizer)
        if was_ready and state["stage"] is OptState.UNSCALED:
            return None  # clip_grad_norm_ has unscaled parts, and the call above the rest
        if state.leaves_unscaling:
            raise RuntimeError(
                "unscale_() is being called after clip_grad_norm_(), which has left unscaling to "
                "step(): call it before."
            )
        is_ours = state["stage"] is OptState.READY and not self._overrides("_unscale_grads_")
        if not is_ours or not self._run_pass(optimizer, state, "unscale"):
            return super().unscale_(optimizer)
        state["stage"] = OptState.UNSCALED

    def clip_grad_norm_(
        self,
        optimizer_or_parameters: OrParameters,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Unscale gradients and clip their norm, instead of :meth:`unscale_` or after it.

        One pass reads the gradients for the overflow check and the norm. A step that unscales by
        itself clips too: until then ``.grad`` stays as it is. Call :meth:`unscale_` first to see
        unscaled gradients. HOST rewrites ``.grad`` here, where unscaling and clipping change it.

        Gradients of parameters, such as ``model.parameters()``, are rewritten here, whoever steps
        them; each call takes one norm. :meth:`step` and :meth:`unscale_` of their optimizers
        unscale the gradients that are left, and skip after an overflow here.

        After an overflow gradients stay as they are, and :meth:`step` skips. The check sees float16
        gradients unscaled in float32 and clipped. A ``grad_scale`` beyond float32 makes gradients
        0.

        Args:
            optimizer_or_parameters: an optimizer, a tensor or an iterable of tensors. The norm is
                over all of their gradients, sparse ones too, and over all processes that have parts
                of DTensors or of FSDP1's parameters.
            max_norm: the limit of the norm.
            norm_type: the order of the norm. For another order than 2, ``inf`` included, torch's
                code clips here, after unscaling.
            error_if_nonfinite: raise for a norm that is not finite. The host waits for it.

        Returns:
            The norm of the unscaled gradients before clipping, a 0-dim float32 tensor on the
            scale's device; inf or NaN after an overflow. The step reads it: write to a clone only,
            as in ``all_reduce``. A disabled scaler returns torch's norm, and so do gradients that
            are tensor subclasses: a DTensor as a whole.

        Raises:
            TypeError: neither an optimizer nor parameters.
            ValueError: ``max_norm`` is negative or NaN, or as :meth:`unscale_` for float16
                gradients that would be rewritten.
            RuntimeError: a second call before :meth:`update`, or a call after :meth:`step`. A norm
                that is not finite, with ``error_if_nonfinite``. Parameters that FSDP1 has split,
                for another ``norm_type`` or a disabled scaler. FSDP1's NO_SHARD parameters, since
                its own ``clip_grad_norm_`` clips them. Nothing has been written, unless torch's
                code clips, or parts had been unscaled before: then all parameters are unscaled.
        """
        target = optimizer_or_parameters
        if not hasattr(target, "param_groups"):
            target = Parameters(target)
        is_l2 = self._enabled and float(norm_type) == 2.0
        if not is_l2:
            check_not_split(target)
        if not self._enabled:
            return clip_as_torch(target, max_norm, norm_type, error_if_nonfinite)
        if not float(max_norm) >= 0:
            raise ValueError(
                "GradScaler.clip_grad_norm_: max_norm must be a number that is not negative, "
                f"got {max_norm}"
            )
        self._check_scale_growth_tracker("clip_grad_norm_")
        state = self._state_of(target)
        state.require_clippable()
        if not is_l2 or self._overrides("unscale_", "_unscale_grads_"):
            self._unscale_once(target, state)
        handover, reduction, result = self._handover(target), self._reduction(target), None
        if is_l2:
            result = self._run_pass(
                target,
                state,
                "clip" if handover is Handover.HOST else "norm",
                reduction,
                max_norm=float(max_norm),
                error_if_nonfinite=error_if_nonfinite,
                written=handover is not Handover.KERNELS,
            )
        if result is not None:
            norm = result[1]
            state.record_clip(norm, float(max_norm), handover)
        else:
            self._unscale_once(target, state)
            norm = clip_as_torch(target, max_norm, norm_type, error_if_nonfinite)
        state.is_clipped = True
        self._limit_norm(norm, state, reduction)
        if isinstance(target, Parameters):
            target.record_unscaled()
        for sharer in state.shared_states:
            sharer.share([state])
        return norm

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Call an optimizer's step unless there was an overflow, as ``torch.amp.GradScaler.step``.

        A step that unscales by itself receives ``grad_scale`` and ``found_inf``, or the scalars of
        :mod:`amp_ext.optim`: 0-dim float32 tensors on the scale's device. It must neither write nor
        keep them: :meth:`update` makes the same memory ready for the next step. With HOST the
        gradients are unscaled here, and the host waits.

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
                self._prepare_step(optimizer, state, handover)
            if not state.found_infs:
                # torch's fused step without any gradients does nothing.
                is_idle = all(param.grad is None for param in params_of(optimizer))
                if handover is not Handover.FOUND_INF or not is_idle:
                    raise AssertionError(_NO_CHECKS)
            result = self._step_of(handover)(optimizer, state, *args, **kwargs)
            if isinstance(optimizer, KernelStep):
                vars(optimizer).pop("grad_scale", None)  # a user's, for this step alone
            state["stage"] = OptState.STEPPED
            return result
        finally:
            # Fused steps write weights without bumping the version that validates copies.
            torch.clear_autocast_cache()

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale, as ``torch.amp.GradScaler.update`` does, by this class's options.

        The host never waits. One launch moves the scale, counts a skipped step, and makes the flag
        and the reciprocal of the scale ready for the next step.
        """
        if not self._enabled:
            return
        if self._scale is None:
            return super().update(new_scale)
        states, numbers = self._step_states(), self._step_numbers()
        overflows = [flag for state in states.values() for flag in state.found_infs.values()]
        is_launched = new_scale is None and bool(overflows)
        if not is_launched:
            super().update(new_scale)
        if is_launched:
            numbers.update(
                self._scale,
                self._growth_tracker,
                overflows,
                self._growth_factor if self._dynamic else 1.0,
                self._backoff_factor if self._dynamic else 1.0,
                self._growth_interval,
                self._min_scale,
                self._max_scale,
                self._hysteresis,
            )
        numbers.begin_step(
            self._scale, [state.found_infs for state in states.values()], is_launched
        )
        # After all that may raise; begin_step() has put the flags of this step into the states.
        overflows = [flag for state in states.values() for flag in state.found_infs.values()]
        above_limit = [s.above_limit for s in states.values() if s.above_limit is not None]
        numbers.count_step(overflows, above_limit, is_launched)
        self._per_optimizer_states = defaultdict(StepState)
        self._close_step(states)

    # ---- passes over gradients -----------------------------------------------------------------

    def _run_pass(
        self,
        target: Optimizer | Parameters,
        state: StepState,
        kind: str,
        reduction: Reduction | None = None,
        **options: Any,
    ) -> tuple[dict[torch.device, Tensor], Tensor | None] | None:
        """Check, unscale or clip gradients in one pass, and record its flags.

        Returns:
            The flags by device and the norm. None, after doing nothing, for gradients that are
            tensor subclasses: torch's code handles them.
        """
        numbers = self._step_numbers()
        is_unscaled = state["stage"] is OptState.UNSCALED
        flags = state.found_infs if is_unscaled else numbers.acquire_flag()
        if is_unscaled and kind == "check" and not state.has_clips:
            flags = {}  # as in torch: users may have repaired gradients since unscale_()
        result = _C.grad_pass(
            target.param_groups,
            kind,
            numbers.inv_scale,
            flags,
            is_unscaled=is_unscaled,
            allow_fp16=self._allow_fp16_grads,
            reduce=reduction or self._reduction(target),
            **options,
        )
        found_infs = {} if result is None else result[0]
        if is_unscaled:
            found_infs = {**flags, **found_infs}
        else:
            numbers.release_flag(flags, found_infs)
        if result is not None:
            state["found_inf_per_device"] = self._or_no_overflow(found_infs)
        return result

    def _unscale_once(self, target: Optimizer | Parameters, state: StepState) -> None:
        if state["stage"] is OptState.READY:
            self.unscale_(target)

    def _limit_norm(self, norm: Tensor, state: StepState, reduction: Reduction | None) -> None:
        """Flag a norm above ``skip_above_norm`` in all processes."""
        if self._skip_above_norm is None:
            return
        above = (norm.to(self._scale) > self._skip_above_norm).float()
        if state.above_limit is not None:  # of an earlier clip of parameters
            above = torch.maximum(above, state.above_limit)
        state.above_limit = above
        is_common = (
            self.process_group is None and reduction is not None and reduction.norm_is_common
        )
        if reduction is not None and not is_common:
            reduction.share(state.above_limit)

    def _state_of(self, target: Optimizer | Parameters) -> StepState:
        """Return the state of a target in this step.

        Where other targets have unscaled some of its gradients already, the rest is unscaled now:
        an optimizer after a clip of its parameters, or parameters after their optimizers.
        """
        state = self._remember(target)
        if state["stage"] is not OptState.READY:
            return state
        others = [other for find in self._optimizers.values() if (other := find()) is not None]
        unscaled = UnscaledGrads(target, others, self._per_optimizer_states)
        if not unscaled.states:
            return state
        left = list(unscaled.left.values())
        if not is_distributed():  # other processes may have gradients that this one has not
            left = [param for param in left if param.grad is not None]
        if left:
            rest = Parameters(left)
            self.unscale_(rest)
            rest.record_unscaled()
            unscaled.states.append(self._per_optimizer_states[id(rest)])
        state["stage"] = OptState.UNSCALED
        state.shared_states = tuple(unscaled.states)
        state.share(unscaled.states)
        return state

    def _reduction(self, target: Optimizer | Parameters) -> Reduction | None:
        return Reduction(self._scale, self.process_group, target) if is_distributed() else None

    def _or_no_overflow(self, found_infs: dict[torch.device, Tensor]) -> dict[torch.device, Tensor]:
        if found_infs or not self._allow_no_grads:
            return found_infs
        return {self._scale.device: self._combined_found_inf([])}

    # ---- the hand-over of a step ---------------------------------------------------------------

    def _overrides(self, *names: str) -> bool:
        """Return whether a subclass or the user has replaced one of these methods."""
        return any(
            getattr(getattr(self, name), "__func__", None) is not getattr(GradScaler, name)
            for name in names
        )

    def _handover(self, target: Optimizer | Parameters) -> Handover:
        """Return the hand-over to a target's step; HOST for overridden methods."""
        if isinstance(target, KernelStep) and self._overrides(
            "unscale_", "_unscale_grads_", "_maybe_opt_step"
        ):
            return Handover.HOST
        return handover_of(target)

    def _handover_of_step(self, optimizer: Optimizer, state: StepState) -> Handover:
        """Return the hand-over that clip_grad_norm_ has chosen, or else the present one."""
        if state.handover is None:
            return self._handover(optimizer)
        if isinstance(optimizer, KernelStep) and optimizer._is_observed:
            raise RuntimeError(
                "GradScaler.step: optimizer: expected the step() to which clip_grad_norm_() has "
                "left unscaling and clipping, got one that is wrapped or hooked since. Wrap it "
                "before clip_grad_norm_()."
            )
        return state.handover

    def _prepare_step(self, optimizer: Optimizer, state: StepState, handover: Handover) -> None:
        """Unscale gradients for the HOST; for a step that unscales, only check them."""
        if handover is Handover.HOST:
            self.unscale_(optimizer)
        elif handover is Handover.FOUND_INF or self._overrides("_check_inf_per_device"):
            self._check_inf_per_device(optimizer)
        else:
            self._check(optimizer, written=False)

    def _step_of(self, handover: Handover) -> Callable[..., float | None]:
        if handover is Handover.HOST:
            return self._maybe_opt_step
        is_own = handover is Handover.KERNELS
        return self._step_with_scalars if is_own else self._step_with_found_inf

    def _step_with_scalars(
        self, optimizer: Optimizer, state: StepState, *args: Any, **kwargs: Any
    ) -> float | None:
        """Call a step with kernels that unscale, clip and skip."""
        state.require_norm_untouched()
        optimizer._step_scalars = StepScalars(
            self._combined_found_inf(state.skip_flags()),
            self._step_numbers().inv_scale if state.is_scaled else None,
            state.norm,
            state.max_norm,
        )
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            del optimizer._step_scalars

    def _step_with_found_inf(
        self, optimizer: Optimizer, state: StepState, *args: Any, **kwargs: Any
    ) -> float | None:
        """Call a step that divides by ``grad_scale`` and skips by ``found_inf``."""
        state.require_norm_untouched()
        preset = getattr(optimizer, "grad_scale", None)
        found_inf = self._combined_found_inf(state.skip_flags())
        divisors = [self._scale] if state.is_scaled else []
        if state.norm is not None:
            # Gradients become 0 where the limit is 0, or the quotient is beyond float32.
            divisors.append((state.norm + 1e-6).div_(state.max_norm).clamp_(min=1.0))
        if preset is not None:
            divisors.append(preset)
        optimizer.grad_scale = functools.reduce(operator.mul, divisors) if divisors else None
        optimizer.found_inf = found_inf
        params = params_without_momentum(optimizer)
        try:
            result = optimizer.step(*args, **kwargs)
            preset = None  # it has been used
        finally:
            del optimizer.grad_scale, optimizer.found_inf
            if preset is not None:
                optimizer.grad_scale = preset
        zero_unwritten_momentum(optimizer, params, found_inf)
        return result

    # ---- torch's hooks -------------------------------------------------------------------------

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: StepState, *args: Any, **kwargs: Any
    ) -> float | None:
        """Wait for the flags, and call the step unless one is set."""
        optimizer_state.skipped = any(flag.item() for flag in optimizer_state.skip_flags())
        return None if optimizer_state.skipped else optimizer.step(*args, **kwargs)

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[torch.device, Tensor]:
        return self._check(optimizer, written=True)

    def _check(self, optimizer: Optimizer, written: bool) -> dict[torch.device, Tensor]:
        """Check the gradients for a step that may write them."""
        self._check_scale_growth_tracker("_check_inf_per_device")
        state = self._state_of(optimizer)
        is_ours = not self._overrides("_unscale_grads_")
        if not is_ours or not self._run_pass(optimizer, state, "check", written=written):
            super()._check_inf_per_device(optimizer)
        return state.found_infs

    def _found_inf_per_device(self, optimizer: Optimizer) -> dict[torch.device, Tensor]:
        return self._state_of(optimizer).found_infs

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True
    ) -> dict[torch.device, Tensor]:
        reduction = self._reduction(optimizer)
        result = _C.grad_pass(
            optimizer.param_groups,
            "unscale",
            inv_scale,
            found_inf,
            allow_fp16=allow_fp16 or self._allow_fp16_grads,
            reduce=reduction,
        )
        if result is not None:
            return self._or_no_overflow(result[0])
        # torch reduces over the meshes of DTensors.
        found_infs = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if reduction is not None:
            is_fsdp = any(map(is_flattened, params_of(optimizer)))
            reduction(found_infs, ["fsdp" if is_fsdp else None], None)
        return self._or_no_overflow(found_infs)
