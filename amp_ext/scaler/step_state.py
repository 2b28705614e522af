"""Keep the state of one optimizer between two updates of the scaler."""

from collections.abc import Callable, Iterable, Reversible
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from amp_ext.scaler.optimizers import Handover, Parameters, params_of


class StepState(dict[str, Any]):
    """Extend torch's state of an optimizer in a step by typed attributes.

    torch's keys are ``"stage"`` and ``"found_inf_per_device"``. The stage is READY until a pass has
    unscaled the gradients or taken their norm, then UNSCALED, and STEPPED after the step. After
    clip_grad_norm_ with a step that unscales, the stage is UNSCALED while ``.grad`` is still
    scaled: see ``leaves_unscaling``.

    A target is an optimizer or :class:`Parameters`. Parameters share gradients with optimizers.

    Attributes:
        target: returns the target of the state; None for a target that is gone or unknown.
        is_clipped: whether clip_grad_norm_ has been called.
        handover: the hand-over to the step; None until step(), or a clip that is left to the step,
            has chosen it.
        norm, max_norm: the norm of the unscaled gradients and its limit, if clip_grad_norm_ has
            left clipping to the step.
        leaves_unscaling: whether clip_grad_norm_ has left unscaling to that step too.
        above_limit: 1.0 if the norm is above ``skip_above_norm``, else 0.0; None without either.
        skipped: whether the host has skipped the step; None if the host did not decide.
        sharers: the states of targets that had unscaled some of the same gradients before.
        unscaled_grads: the gradients that a clip of parameters has unscaled, by the parameters' id.
        stepped: the versions that such gradients had after steps of optimizers, likewise.
    """

    target: Callable[[], Any] = staticmethod(lambda: None)
    is_clipped: bool = False
    handover: Handover | None = None
    norm: Tensor | None = None
    max_norm: float | None = None
    leaves_unscaling: bool = False
    above_limit: Tensor | None = None
    skipped: bool | None = None
    sharers: "tuple[StepState, ...]" = ()
    unscaled_grads: dict[int, Tensor] | None = None

    def __init__(self) -> None:
        super().__init__(stage=OptState.READY, found_inf_per_device={})
        self.stepped: dict[int, int | None] = {}

    @property
    def found_infs(self) -> dict[torch.device, Tensor]:
        """Return the flags of overflows by device."""
        return self["found_inf_per_device"]

    @property
    def is_scaled(self) -> bool:
        """Return whether the gradients are still scaled."""
        return self["stage"] is OptState.READY or self.leaves_unscaling

    def skip_flags(self) -> list[Tensor]:
        """Return the flags that skip the step: overflows, and a norm above the limit."""
        above = [] if self.above_limit is None else [self.above_limit]
        return [*self.found_infs.values(), *above]

    def record_clip(self, norm: Tensor, max_norm: float, handover: Handover) -> None:
        """Record a clip done by the HOST, or left to the step."""
        if handover is not Handover.HOST:
            self.handover, self.norm, self.max_norm = handover, norm, max_norm
            self.leaves_unscaling = self["stage"] is OptState.READY
            self._norm_version = _version_of(norm)
        self["stage"] = OptState.UNSCALED

    # ---- gradients of several targets ------------------------------------------------------------

    def record_unscaled(self) -> None:
        """Record the current gradients of parameters as unscaled."""
        grads = {id(param): param.grad for param in params_of(self.target())}
        self.unscaled_grads = {key: grad for key, grad in grads.items() if grad is not None}

    def record_step(self, optimizer: Any) -> None:
        """Record that a step has used gradients. Those written after it are of another loss."""
        if self.unscaled_grads is not None:
            self.stepped |= {id(param): _version_of(param.grad) for param in params_of(optimizer)}

    def unscaled(self, replaceable: Iterable[int]) -> set[int]:
        """Return the ids of the parameters with unscaled gradients.

        Until a step, gradients of ``replaceable`` parameters count though they are other tensors
        than the recorded ones: users edit gradients, and FSDP1 makes its views anew.
        """
        params = {id(param): param.grad for param in params_of(self.target())}
        old = self.unscaled_grads
        if old is None:
            return set(params)
        kept = {key for key, grad in params.items() if grad is old.get(key)}
        if not self.stepped:
            kept |= {key for key in replaceable if key in old and params[key] is not None}
        written = {k for k, v in self.stepped.items() if k in kept and v != _version_of(params[k])}
        return kept - written

    def find_sharers(self, states: Reversible["StepState"]) -> list[Tensor]:
        """Set ``sharers``, and return the parameters whose gradients none of them has unscaled."""
        target, sharers, left = self.target(), [], None
        for state in reversed(states):  # a replaced gradient is most likely of the latest one
            other = state.target()
            shares = isinstance(target, Parameters) or isinstance(other, Parameters)
            if not shares or other is None or state["stage"] is OptState.READY:
                continue
            if left is None:
                params = left = {id(param): param for param in params_of(target)}
            unscaled = state.unscaled(() if isinstance(target, Parameters) else left)
            if not unscaled.isdisjoint(params):
                state.require_clippable(is_shared=True)
                sharers.append(state)
                left = {key: param for key, param in left.items() if key not in unscaled}
        self.sharers = tuple(sharers)
        return list((left or {}).values())

    def take_flags(self, states: Iterable["StepState"]) -> None:
        """Take over the flags of other states: all of their steps are skipped together."""
        for state in states:
            for device, flag in state.found_infs.items():
                own = self.found_infs.get(device, flag)
                self.found_infs[device] = flag if own is flag else torch.maximum(own, flag)
            if state.above_limit is not None:
                own = state.above_limit if self.above_limit is None else self.above_limit
                self.above_limit = torch.maximum(own, state.above_limit)

    def forget_parameters(self) -> None:
        """Drop the references that would keep parameters alive until the next update."""
        self.sharers, self.unscaled_grads = (), None
        if isinstance(self.target(), Parameters):
            del self.target

    def require_clippable(self, is_shared: bool = False) -> None:
        """Raise unless clip_grad_norm_ may clip all gradients of the target, or shared ones."""
        if self["stage"] is OptState.STEPPED:
            raise RuntimeError("clip_grad_norm_() is being called after step().")
        if self.norm is not None or (self.is_clipped and not is_shared):
            raise RuntimeError(
                "clip_grad_norm_() has already been called on this optimizer since the last "
                "update()."
            )

    def require_norm_untouched(self) -> None:
        """Raise if a norm that the step reads has been written."""
        if self.norm is not None and _version_of(self.norm) != self._norm_version:
            raise RuntimeError(
                "The norm that clip_grad_norm_() returned has been written in place before step(), "
                "which reads it: write to a clone() of it."
            )


def _version_of(tensor: Tensor | None) -> int | None:
    return None if tensor is None or tensor.is_inference() else tensor._version
