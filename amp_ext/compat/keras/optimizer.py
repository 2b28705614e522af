"""Provide Keras's LossScaleOptimizer for optimizers of torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from amp_ext.scaler import GradScaler
from amp_ext.scaler.optimizers import params_of

_SCALE = "loss_scale"


class LossScaleOptimizer(Optimizer):
    """Join an optimizer and a scaler, as ``keras.optimizers.LossScaleOptimizer`` (Keras 3)::

        optimizer = LossScaleOptimizer(torch.optim.Adam(model.parameters()))
        optimizer.zero_grad()
        optimizer.scale_loss(loss).backward()
        optimizer.step()  # unscales, steps or skips, and moves the scale

    The scale doubles after ``dynamic_growth_steps`` steps without an overflow. An overflow halves
    the scale, and the step is skipped. Where Keras's scale would become 0 or infinite, this one
    stops.

    The class has the interface of torch's optimizers, for learning-rate schedules and checkpoints.
    Groups, state and step hooks are the inner optimizer's. Its hooks run only for steps that are
    made.

    Args:
        inner_optimizer: an optimizer of torch, with parameters on one kind of device.
        initial_scale, dynamic_growth_steps: as in Keras.
        scaler_options: keywords of :class:`amp_ext.GradScaler`, as ``min_scale=1.0``.

    Attributes:
        inner_optimizer: the optimizer.
        scaler: the scaler. ``scaler.clip_grad_norm_(optimizer.inner_optimizer, 1.0)`` clips,
            before :meth:`step`.

    Raises:
        TypeError: ``inner_optimizer`` is no optimizer of torch, or is of this class.
    """

    def __init__(
        self,
        inner_optimizer: Optimizer,
        initial_scale: float = 2.0**15,
        dynamic_growth_steps: int = 2000,
        **scaler_options: Any,
    ) -> None:
        if not isinstance(inner_optimizer, Optimizer) or isinstance(inner_optimizer, type(self)):
            raise TypeError(
                "LossScaleOptimizer: inner_optimizer: expected an optimizer of torch, got "
                f"{type(inner_optimizer).__name__}."
            )
        # Optimizer.__init__ is not called: groups, state and hooks are the inner optimizer's.
        self.inner_optimizer = inner_optimizer
        self.scaler = GradScaler(
            next(params_of(inner_optimizer)).device.type,
            initial_scale,
            growth_interval=dynamic_growth_steps,
            **scaler_options,
        )

    # ---- Keras's interface ---------------------------------------------------------------------

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return ``loss`` times the scale, for ``backward``."""
        return self.scaler.scale(loss)

    def apply(
        self, grads: Sequence[Tensor | None], trainable_variables: Sequence[Tensor] | None = None
    ) -> None:
        """Make a :meth:`step` with these gradients of the scaled loss, and set ``.grad``.

        Args:
            grads: as of ``torch.autograd.grad(optimizer.scale_loss(loss), variables)``; None for a
                variable that the loss does not depend on.
            trainable_variables: the parameters of the gradients. None stands for all parameters of
                the optimizer, in its order. Other parameters have no gradient in this step.

        Raises:
            ValueError: not as many gradients as variables, a gradient of another shape, or a
                variable that is not the optimizer's. Nothing has changed then.
        """
        own, grads = list(params_of(self)), list(grads)
        variables = own if trainable_variables is None else list(trainable_variables)
        if len(grads) != len(variables):
            raise ValueError(
                f"LossScaleOptimizer.apply: grads: expected {len(variables)}, one for each "
                f"variable, got {len(grads)}."
            )
        known = set(map(id, own))
        for i, (grad, variable) in enumerate(zip(grads, variables, strict=True)):
            if id(variable) not in known:
                raise ValueError(
                    f"LossScaleOptimizer.apply: trainable_variables: expected parameters of "
                    f"inner_optimizer, got another tensor at index {i}."
                )
            if grad is not None and grad.shape != variable.shape:
                raise ValueError(
                    f"LossScaleOptimizer.apply: grads: expected shape {tuple(variable.shape)} at "
                    f"index {i}, got {tuple(grad.shape)}."
                )
        self.zero_grad()
        for grad, variable in zip(grads, variables, strict=True):
            variable.grad = grad
        self.step()

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Tensor | None, Tensor]]) -> None:
        """Call :meth:`apply` with pairs of a gradient and its variable."""
        pairs = list(grads_and_vars)
        self.apply([grad for grad, _ in pairs], [variable for _, variable in pairs])

    def minimize(self, loss: Tensor) -> None:
        """Clear the gradients, differentiate the scaled loss, and make a :meth:`step`."""
        self.zero_grad()
        self.scale_loss(loss).backward()
        self.step()

    @property
    def dynamic_scale(self) -> float:
        """The scale. Synchronises with the device."""
        return self.scaler.get_scale()

    # ---- torch's interface ---------------------------------------------------------------------

    def step(self, closure: None = None) -> float | None:
        """Unscale, make or skip the step, and move the scale.

        The step consists of ``scaler.step(inner_optimizer)`` and ``scaler.update()``.

        Raises:
            RuntimeError: a closure; a step before any :meth:`scale_loss`; ``scaler`` has unscaled
                or clipped this optimizer, not the inner one.
        """
        if closure is not None:
            raise RuntimeError("LossScaleOptimizer.step: closure: expected None.")
        if self.scaler.is_enabled() and self.scaler._scale is None:
            raise RuntimeError(
                "LossScaleOptimizer.step: expected gradients of a scaled loss. Call "
                "scale_loss(loss).backward() before."
            )
        if id(self) in self.scaler._per_optimizer_states:
            raise RuntimeError(
                "LossScaleOptimizer.step: scaler: expected inner_optimizer in unscale_ and "
                "clip_grad_norm_, got the LossScaleOptimizer. Give it inner_optimizer."
            )
        result = self.scaler.step(self.inner_optimizer)
        self.scaler.update()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner_optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner_optimizer.add_param_group(param_group)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner_optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.inner_optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.inner_optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state, with the scaler's state in one more entry."""
        return {**self.inner_optimizer.state_dict(), _SCALE: self.scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of the inner optimizer.

        A state of the inner optimizer leaves the scale as it is.
        """
        own = {key: value for key, value in state_dict.items() if key != _SCALE}
        scale = state_dict.get(_SCALE)
        if scale and self.scaler.is_enabled():
            GradScaler("cpu").load_state_dict(scale)  # raises before anything changes
        self.inner_optimizer.load_state_dict(own)
        if scale:
            self.scaler.load_state_dict(scale)

    def __getattr__(self, name: str) -> Any:
        """Return another attribute of the inner optimizer, such as its hooks."""
        if name == "inner_optimizer":  # while it is being loaded
            raise AttributeError(name)
        return getattr(self.inner_optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return {"inner_optimizer": self.inner_optimizer, "scaler": self.scaler}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
