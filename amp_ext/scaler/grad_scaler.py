"""Scale losses: passes over gradients, the hand-over of a step, and the update of the scale.

scaler.step() checks gradients that no pass has checked, and hands the step over to the optimizer.
The hand-over depends on the optimizer:

=========  =============================  ===================  =================================
Handover   optimizers                     unscaled by, unless  after an overflow
                                          unscale_ has
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
receives a closure, or whose scaler overrides ``unscale_``, ``_unscale_grads_`` or
``_maybe_opt_step``: other code sees or makes unscaled gradients. Wrappers of torch's LR schedulers
do not count; global step hooks do. With FOUND_INF, wrappers and hooks see scaled gradients and run
in skipped steps, as under torch's scaler.

A step with FOUND_INF leaves ``.grad`` unscaled and clipped, one with KERNELS leaves it as it was.

The host waits for the device in scaler.step() with HOST, in each pass of a process without
gradients, and where users read, as in ``get_scale``, ``state_dict`` and ``error_if_nonfinite``.
"""

import functools
import math
import operator
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp import GradScaler as TorchsScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from amp_ext._library import _C
from amp_ext.optim._step import KernelStep, StepScalars
from amp_ext.scaler.checkpoint import check_bounds, checked_count
from amp_ext.scaler.loss_scale import combined
from amp_ext.scaler.optimizers import (
    Handover,
    OrParameters,
    Parameters,
    handover_of,
    momenta,
    params_of,
    takes_scaler,
    zero_new_momenta,
)
from amp_ext.scaler.processes import Reduction, check_split, clip_as_torch, is_distributed
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
        hysteresis: the scale backs off at this number of consecutive overflows, and at each one
            after that. 1, as in torch, stands for every overflow.
        dynamic: False for a scale that only users move. With an ``init_scale`` of 1.0, such a
            scaler skips bfloat16 steps with an overflow, and writes no gradient.
        max_consecutive_skips: so many skipped steps in a row raise an error at the next read, such
            as ``step_was_skipped``; nothing waits for it.
        skip_above_norm: skip steps with a larger norm from ``clip_grad_norm_``. For the scale they
            are steps without an overflow. None stands for no limit.
        process_group: processes of ``torch.distributed`` that skip steps together although their
            parameters do not show it, as in pipelines; and the processes of FSDP1's parameters,
            where None stands for all. DTensors and DDP need none. An overflow in a shard reaches
            all its shards first, and from each of them its ``process_group``.

    Raises:
        ValueError: ``min_scale`` is negative or infinite. ``max_scale`` is not positive, or is
            below ``min_scale``. ``hysteresis`` or ``max_consecutive_skips`` is not an integer from
            1 to 2**31 - 1. ``skip_above_norm`` is not positive.

    docs/scaler.md lists the differences from torch, where torch can fail silently.
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
        process_group: "ProcessGroup | None" = None,
    ) -> None:
        growth_interval = operator.index(growth_interval)
        # super() is wrong: the base of amp_ext.cuda.amp's scaler has torch.cuda.amp's arguments.
        TorchsScaler.__init__(
            self, device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        check_bounds(min_scale, max_scale, skip_above_norm)
        if max_consecutive_skips is not None:
            max_consecutive_skips = checked_count("max_consecutive_skips", max_consecutive_skips)
        self.process_group = process_group
        self._dynamic = dynamic
        self._min_scale, self._max_scale = min_scale, max_scale
        self._hysteresis = checked_count("hysteresis", hysteresis)
        self._max_consecutive_skips = max_consecutive_skips
        self._skip_above_norm = skip_above_norm
        self._allow_fp16_grads = allow_fp16_grads
        self._allow_no_grads = allow_no_grads
        self._per_optimizer_states = defaultdict(StepState)
        self._last_states = {}
        self._numbers = None
        self._init_hysteresis_tracker, self._init_skipped_steps = self._hysteresis, 0

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale an optimizer's gradients, as ``torch.amp.GradScaler.unscale_`` does.

        The pass also checks the gradients, whoever steps later. The host does not wait. After an
        overflow gradients are written all the same, as by torch, and :meth:`step` skips.
        """
        if not self._enabled or self._scale is None:
            return super().unscale_(optimizer)
        state = self._state_of(optimizer)
        if self._unscale_rest(optimizer, state):
            return None
        is_ours = state["stage"] is OptState.READY and not self._is_overridden
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
        itself clips too: ``.grad`` stays as it is until that step. Call :meth:`unscale_` first to
        see unscaled gradients. With HOST, ``.grad`` is rewritten here.

        Gradients of parameters, such as ``model.parameters()``, are rewritten here, whoever steps
        them; each call takes one norm. :meth:`step` and :meth:`unscale_` of their optimizers
        unscale the gradients that are left, and skip after an overflow here.

        After an overflow gradients stay as they are, and :meth:`step` skips. The check sees float16
        gradients unscaled in float32 and clipped. If the scale divided by the factor of the clip is
        beyond float32, a step with FOUND_INF makes the gradients 0.

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
            as in ``all_reduce``. Disabled scalers and tensor subclasses other than DTensor return
            torch's norm.

        Raises:
            TypeError, AssertionError: neither an optimizer nor parameters.
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
            check_split(target, is_expected=False)
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
        self._unscale_rest(target, state)
        if state["stage"] is OptState.READY and (not is_l2 or self._is_overridden):
            self.unscale_(target)
        handover, reduction = self._handover(target), self._reduction(target)
        result = is_l2 and self._run_pass(
            target,
            state,
            "clip" if handover is Handover.HOST else "norm",
            reduction,
            max_norm=float(max_norm),
            error_if_nonfinite=error_if_nonfinite,
            written=handover is not Handover.KERNELS,
        )
        if result:
            norm = self._checked_norm(result[1], state, error_if_nonfinite)
            state.record_clip(norm, float(max_norm), handover)
        else:
            if state["stage"] is OptState.READY:
                self.unscale_(target)
            norm = clip_as_torch(target, max_norm, norm_type, error_if_nonfinite)
            norm = self._checked_norm(norm, state, error_if_nonfinite)
        state.is_clipped = True
        self._limit_norm(norm, state, reduction)
        if isinstance(target, Parameters):
            state.record_unscaled()
        for sharer in state.sharers:
            sharer.take_flags([state])
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
            is_torchs = not self._enabled or self._scale is None or takes_scaler(optimizer)
            if is_torchs or "closure" in kwargs:
                return super().step(optimizer, *args, **kwargs)
            state = self._state_of(optimizer)
            if state["stage"] is OptState.STEPPED:
                return super().step(optimizer, *args, **kwargs)
            self._unscale_rest(optimizer, state)
            self._choose_handover(optimizer, state, args)
            if state["stage"] is OptState.READY:
                is_host = state.handover is Handover.HOST
                (self.unscale_ if is_host else self._check_inf_per_device)(optimizer)
            self._require_checks(optimizer, state)
            steps = {
                Handover.HOST: self._maybe_opt_step,
                Handover.FOUND_INF: self._step_with_found_inf,
                Handover.KERNELS: self._step_with_scalars,
            }
            result = steps[state.handover](optimizer, state, *args, **kwargs)
            if isinstance(optimizer, KernelStep):
                vars(optimizer).pop("grad_scale", None)  # set by the user, for this step alone
            state["stage"] = OptState.STEPPED
            for other in self._per_optimizer_states.values():
                other.record_step(optimizer)
            return result
        finally:
            # Fused steps write weights without bumping the version that validates copies.
            torch.clear_autocast_cache()

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale, as ``torch.amp.GradScaler.update`` does, by this class's options.

        The host never waits. One launch moves the scale, counts a skipped step, and makes the flag
        and the reciprocal of the scale ready for the next step. ``new_scale``, ``skip_above_norm``
        and ``max_consecutive_skips`` add launches.
        """
        if not self._enabled:
            return
        if self._scale is None:
            return super().update(new_scale)
        states, numbers = self._per_optimizer_states, self._step_numbers()
        flags = [flag for state in states.values() for flag in state.found_infs.values()]
        is_launched = new_scale is None and bool(flags)
        if is_launched:
            numbers.update(
                self._scale,
                self._growth_tracker,
                flags,
                growth_factor=self._growth_factor if self._dynamic else 1.0,
                backoff_factor=self._backoff_factor if self._dynamic else 1.0,
                growth_interval=self._growth_interval,
                min_scale=self._min_scale,
                max_scale=self._max_scale,
                hysteresis=self._hysteresis,
            )
        else:
            super().update(new_scale)
        numbers.close_step(self._scale, states.values(), is_launched)
        for state in states.values():
            state.forget_parameters()
        self._per_optimizer_states, self._last_states = defaultdict(StepState), states

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
        if is_unscaled and kind == "check" and not (state.is_clipped or state.sharers):
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
        if result is not None:
            state["found_inf_per_device"] = {**(flags if is_unscaled else {}), **result[0]}
        return result

    def _unscale_rest(self, target: Optimizer | Parameters, state: StepState) -> bool:
        """Unscale the rest of a target, if others have unscaled some of its gradients.

        Clips of parameters unscale some gradients of optimizers, and optimizers those of parameters
        to be clipped. All of their steps are skipped together.
        """
        if state["stage"] is not OptState.READY:
            return False
        left = state.find_sharers(self._per_optimizer_states.values())
        if not state.sharers:
            return False
        if left:
            rest = Parameters(left)
            self.unscale_(rest)
            rest_state = self._state_of(rest)
            rest_state.record_unscaled()
            state.sharers += (rest_state,)
        state["stage"] = OptState.UNSCALED
        state.take_flags(state.sharers)
        return True

    def _checked_norm(self, norm: Tensor, state: StepState, error_if_nonfinite: bool) -> Tensor:
        """Return the norm, or inf if an earlier clip has left gradients scaled by an overflow."""
        flags = [flag for s in state.sharers if s.is_clipped for flag in s.found_infs.values()]
        if not flags:
            return norm
        norm = norm.masked_fill(combined(flags, norm.device) != 0, math.inf)
        # One number is its own norm. torch raises the error.
        return torch.nn.utils.get_total_norm([norm], math.inf, error_if_nonfinite)

    def _limit_norm(self, norm: Tensor, state: StepState, reduction: Reduction | None) -> None:
        """Flag a norm above ``skip_above_norm`` in all processes."""
        if self._skip_above_norm is None:
            return
        above = (norm.to(self._scale) > self._skip_above_norm).float()
        if state.above_limit is not None:  # of an earlier clip of parameters
            above = torch.maximum(above, state.above_limit)
        if reduction is not None:
            reduction.spread(above)
        state.above_limit = above

    def _reduction(self, target: Optimizer | Parameters) -> Reduction | None:
        return Reduction(self._scale, self.process_group, target) if is_distributed() else None

    # ---- the hand-over of a step ---------------------------------------------------------------

    @property
    def _is_overridden(self) -> bool:
        """Return whether a subclass or an attribute replaces a method that sees gradients."""
        return any(
            getattr(getattr(self, name), "__func__", None) is not getattr(GradScaler, name)
            for name in ("unscale_", "_unscale_grads_", "_maybe_opt_step")
        )

    def _handover(self, target: Optimizer | Parameters) -> Handover:
        """Return the hand-over to a target's step. Overridden methods turn KERNELS into HOST."""
        if isinstance(target, KernelStep) and self._is_overridden:
            return Handover.HOST
        return handover_of(target)

    def _choose_handover(self, optimizer: Optimizer, state: StepState, args: Any) -> None:
        """Set the hand-over, or keep that of a clip, whose step and norm must be as they were."""
        # A fused step, as torch's, divides the closure's gradients by the scale.
        has_closure = (
            isinstance(optimizer, KernelStep)
            and any(arg is not None for arg in args)
            and not all(group["fused"] for group in optimizer.param_groups)
        )
        if state.norm is None:
            state.handover = Handover.HOST if has_closure else self._handover(optimizer)
        elif has_closure:
            raise RuntimeError(
                "GradScaler.step: clip_grad_norm_() has left clipping to this step: expected no "
                "closure. Clip parameters instead of the optimizer."
            )
        elif isinstance(optimizer, KernelStep) and optimizer._is_observed:
            raise RuntimeError(
                "GradScaler.step: optimizer: expected the step() to which clip_grad_norm_() has "
                "left unscaling and clipping, got one that is wrapped or hooked since. Wrap it "
                "before clip_grad_norm_()."
            )
        state.require_norm_untouched()

    def _require_checks(self, optimizer: Optimizer, state: StepState) -> None:
        """Raise for an optimizer without gradients, unless that is allowed."""
        if state.found_infs:
            return
        if self._allow_no_grads:
            state.found_infs[self._scale.device] = combined([], self._scale.device)
            return
        # A fused step without any gradients does nothing, and needs no check.
        has_grads = any(param.grad is not None for param in params_of(optimizer))
        is_fused = state.handover is Handover.FOUND_INF or (
            state.handover is Handover.KERNELS
            and all(g.get("fused") for g in optimizer.param_groups)
        )
        if has_grads or not is_fused:
            raise AssertionError(_NO_CHECKS)

    def _step_with_scalars(
        self, optimizer: Optimizer, state: StepState, *args: Any, **kwargs: Any
    ) -> float | None:
        """Call a step with kernels that unscale, clip and skip."""
        optimizer._step_scalars = StepScalars(
            combined(state.skip_flags(), self._scale.device),
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
        divisors = [self._scale] if state.is_scaled else []
        if state.norm is not None:
            # Gradients become 0 where the limit is 0, or the quotient is beyond float32.
            divisors.append((state.norm + 1e-6).div_(state.max_norm).clamp_(min=1.0))
        preset = getattr(optimizer, "grad_scale", None)
        if preset is not None:
            divisors.append(preset)
        found_inf = combined(state.skip_flags(), self._scale.device)
        optimizer.grad_scale = functools.reduce(operator.mul, divisors) if divisors else None
        optimizer.found_inf = found_inf
        old = momenta(optimizer)
        try:
            result = optimizer.step(*args, **kwargs)
        except BaseException:
            if preset is None:
                del optimizer.grad_scale
            else:
                optimizer.grad_scale = preset  # for another attempt
            raise
        finally:
            del optimizer.found_inf
        del optimizer.grad_scale
        zero_new_momenta(optimizer, old, found_inf)
        return result

    # ---- torch's hooks -------------------------------------------------------------------------

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: StepState, *args: Any, **kwargs: Any
    ) -> float | None:
        """Wait for the flags, and call the step unless one is set."""
        optimizer_state.skipped = any(flag.item() for flag in optimizer_state.skip_flags())
        return None if optimizer_state.skipped else optimizer.step(*args, **kwargs)

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[torch.device, Tensor]:
        """Check the gradients. Steps other than KERNELS write them later."""
        self._check_scale_growth_tracker("_check_inf_per_device")
        state = self._state_of(optimizer)
        self._unscale_rest(optimizer, state)
        written = state.handover is not Handover.KERNELS
        if self._is_overridden or not self._run_pass(optimizer, state, "check", written=written):
            super()._check_inf_per_device(optimizer)
        return state.found_infs

    def _found_inf_per_device(self, optimizer: Optimizer) -> dict[torch.device, Tensor]:
        state = self._state_of(optimizer)
        self._unscale_rest(optimizer, state)
        return state.found_infs

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True
    ) -> dict[torch.device, Tensor]:
        reduction = self._reduction(optimizer)
        grads = [getattr(param, "grad", None) for param in params_of(optimizer)]
        devices = {grad.device for grad in grads if grad is not None}
        result = _C.grad_pass(
            optimizer.param_groups,
            "unscale",
            inv_scale,
            {device: found_inf.to(device, copy=True) for device in devices},
            allow_fp16=allow_fp16 or self._allow_fp16_grads,
            reduce=reduction,
        )
        if result is not None:
            return result[0]
        # torch reduces over the meshes of DTensors.
        found_infs = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if reduction is not None:
            is_fsdp = any(hasattr(p, "_fsdp_flattened") for p in params_of(optimizer))
            reduction(found_infs, ["fsdp" if is_fsdp else None], None)
        return found_infs
