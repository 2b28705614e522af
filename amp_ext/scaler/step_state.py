"""Keep the state of one optimizer between two updates of the scaler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from amp_ext.scaler.optimizers import Handover


class StepState(dict[str, Any]):
    """Extend torch's state of an optimizer in a step by typed attributes.

    torch's keys are ``"stage"`` and ``"found_inf_per_device"``. The stage is READY until a pass has
    unscaled the gradients or taken their norm, then UNSCALED, and STEPPED after the step. After
    clip_grad_norm_ with a step that unscales, the stage is UNSCALED while ``.grad`` is still
    scaled: see ``leaves_unscaling``.

    Attributes:
        is_clipped: whether clip_grad_norm_ has been called.
        handover: the hand-over to the step that clip_grad_norm_ has left clipping to; None if no
            work has been left.
        leaves_unscaling: whether clip_grad_norm_ has left unscaling to that step too.
        norm, max_norm: the norm of the unscaled gradients and its limit, for that step.
        above_limit: 1.0 if the norm is above ``skip_above_norm``, else 0.0; None without a norm.
        skipped: whether the host has skipped the step; None if the host did not decide.
        shared_states: the states of targets that have unscaled some of the same gradients.
    """

    is_clipped: bool = False
    handover: Handover | None = None
    leaves_unscaling: bool = False
    norm: Tensor | None = None
    max_norm: float | None = None
    above_limit: Tensor | None = None
    skipped: bool | None = None
    shared_states: tuple[StepState, ...] = ()

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        """Start a step, or wrap a state of torch's."""
        super().__init__(stage=OptState.READY, found_inf_per_device={})
        self.update(state or {})

    @property
    def found_infs(self) -> dict[torch.device, Tensor]:
        """Return the flags of overflows by device."""
        return self["found_inf_per_device"]

    @property
    def is_scaled(self) -> bool:
        """Return whether the gradients are still scaled."""
        return self["stage"] is OptState.READY or self.leaves_unscaling

    @property
    def has_clips(self) -> bool:
        """Whether flags are of a clip, which leaves gradients scaled after an overflow."""
        return self.is_clipped or any(state.is_clipped for state in self.shared_states)

    def skip_flags(self) -> list[Tensor]:
        """Return the flags that skip the step: overflows, and a norm above the limit."""
        above = [] if self.above_limit is None else [self.above_limit]
        return [*self.found_infs.values(), *above]

    def record_clip(self, norm: Tensor, max_norm: float, handover: Handover) -> None:
        """Record a clip done by the HOST, or left to the step."""
        if handover is not Handover.HOST:
            self.handover, self.norm, self.max_norm = handover, norm, max_norm
            self.leaves_unscaling = self["stage"] is OptState.READY
            self._norm_version = norm._version
        self["stage"] = OptState.UNSCALED

    def share(self, states: Iterable[StepState]) -> None:
        """Take over the flags of other states: all of their steps are skipped together."""
        flags: dict[torch.device, Tensor] = {}
        for state in states:
            for device, flag in state.found_infs.items():
                flags[device] = torch.maximum(flags[device], flag) if device in flags else flag
            if state.above_limit is not None:
                before = state.above_limit if self.above_limit is None else self.above_limit
                self.above_limit = torch.maximum(before, state.above_limit)
        self["found_inf_per_device"] = flags

    # ---- errors --------------------------------------------------------------------------------

    def require_clippable(self) -> None:
        """Raise unless clip_grad_norm_ may be called."""
        self._require_unstepped()
        if self.is_clipped:
            raise RuntimeError(
                "clip_grad_norm_() has already been called on this optimizer since the last "
                "update()."
            )

    def require_shareable(self) -> None:
        """Raise unless parameters of this optimizer may be clipped by themselves."""
        self._require_unstepped()
        if self.handover is not None:
            raise RuntimeError(
                "clip_grad_norm_() has already been called on an optimizer of these parameters "
                "since the last update(), and has left clipping to its step()."
            )

    def _require_unstepped(self) -> None:
        if self["stage"] is OptState.STEPPED:
            raise RuntimeError("clip_grad_norm_() is being called after step().")

    def require_norm_untouched(self) -> None:
        """Raise if a norm that the step reads has been written."""
        if self.norm is not None and self.norm._version != self._norm_version:
            raise RuntimeError(
                "The norm that clip_grad_norm_() returned has been written in place before step(), "
                "which reads it: write to a clone() of it."
            )
