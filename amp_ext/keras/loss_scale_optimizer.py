"""Keras's LossScaleOptimizer, for optimizers of torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from amp_ext.scaler import GradScaler

_STATE = "loss_scale"
_KEPT = ("inner_optimizer", "scaler", "name", "initial_scale", "dynamic_growth_steps")
# Arguments of every optimizer of Keras's, which this one refuses, too.
_OF_INNER = (
    *("weight_decay", "clipnorm", "global_clipnorm", "clipvalue", "use_ema", "ema_momentum"),
    *("ema_overwrite_frequency", "loss_scale_factor", "gradient_accumulation_steps"),
)


class LossScaleOptimizer(Optimizer):
    """``keras.optimizers.LossScaleOptimizer`` (Keras 3): an optimizer of torch and a
    :class:`amp_ext.GradScaler` in one::

        optimizer = LossScaleOptimizer(torch.optim.Adam(model.parameters()))
        optimizer.zero_grad()
        optimizer.scale_loss(loss).backward()
        optimizer.step()  # unscales, steps or skips, and moves the scale

    The scale doubles after ``dynamic_growth_steps`` steps without overflow in a row; an overflow
    halves it, and the step is skipped. Where Keras's would become 0 or infinite, this one stops.

    It has the interface of torch's optimizers, for learning-rate schedules and checkpoints; groups,
    state and step hooks are the inner optimizer's, whose hooks run for the steps that are made.

    Args:
        inner_optimizer: an optimizer of torch, of parameters on one kind of device.
        initial_scale, dynamic_growth_steps, name: as in Keras.
        scaler_options: keywords of :class:`amp_ext.GradScaler`, as ``min_scale=1.0``.

    Attributes:
        inner_optimizer, scaler: what this is made of. ``scaler.clip_grad_norm_(optimizer, 1.0)``
            clips, before :meth:`step`, given ``inner_optimizer`` as the optimizer.

    Raises:
        TypeError: ``inner_optimizer`` is no optimizer of torch, or is one of this class.
        ValueError: arguments that are the inner optimizer's; ``dynamic=False``.
    """

    def __init__(
        self,
        inner_optimizer: Optimizer,
        initial_scale: float = 2.0**15,
        dynamic_growth_steps: int = 2000,
        name: str | None = None,
        **scaler_options: Any,
    ) -> None:
        if not isinstance(inner_optimizer, Optimizer) or isinstance(inner_optimizer, type(self)):
            raise TypeError(
                "LossScaleOptimizer: inner_optimizer must be an optimizer of torch, got "
                f"{type(inner_optimizer).__name__}"
            )
        for argument in scaler_options:
            if argument in _OF_INNER:
                raise ValueError(
                    f"LossScaleOptimizer does not take {argument}: it belongs to inner_optimizer"
                )
        if not scaler_options.get("dynamic", True):
            raise ValueError(
                "LossScaleOptimizer does not take dynamic=False: for a static scale use "
                "amp_ext.GradScaler(init_scale=..., dynamic=False)"
            )
        # Not Optimizer.__init__, whose groups, state and hooks are the inner optimizer's.
        self.inner_optimizer = inner_optimizer
        self.name = name
        self.initial_scale = initial_scale
        self.dynamic_growth_steps = dynamic_growth_steps
        self.scaler = GradScaler(
            self._variables()[0].device.type,
            initial_scale,
            growth_interval=dynamic_growth_steps,
            **scaler_options,
        )

    # ---- Keras's interface ---------------------------------------------------------------------

    def scale_loss(self, loss: Tensor) -> Tensor:
        """``loss`` times the scale, for ``backward``."""
        return self.scaler.scale(loss)

    def apply(
        self, grads: Sequence[Tensor | None], trainable_variables: Sequence[Tensor] | None = None
    ) -> None:
        """A :meth:`step` with these gradients of the scaled loss, which become ``.grad``.

        Args:
            grads: as of ``torch.autograd.grad(optimizer.scale_loss(loss), variables)``; None for a
                variable that the loss does not depend on.
            trainable_variables: the parameters that they belong to; all of the optimizer's, in its
                order, when None. Others have no gradient in this step.

        Raises:
            ValueError: not as many gradients as variables, a gradient of another shape, or a
                variable that is not the optimizer's. Nothing has changed then.
        """
        own, grads = self._variables(), list(grads)
        variables = own if trainable_variables is None else list(trainable_variables)
        if len(grads) != len(variables):
            raise ValueError(
                f"LossScaleOptimizer.apply: expected {len(variables)} gradients, one for each "
                f"variable, got {len(grads)}"
            )
        known = set(map(id, own))
        for i, (grad, variable) in enumerate(zip(grads, variables, strict=True)):
            if id(variable) not in known:
                raise ValueError(
                    f"LossScaleOptimizer.apply: variable {i} is no parameter of inner_optimizer"
                )
            if grad is not None and grad.shape != variable.shape:
                raise ValueError(
                    f"LossScaleOptimizer.apply: gradient {i} has shape {tuple(grad.shape)}, its "
                    f"variable {tuple(variable.shape)}"
                )
        self.zero_grad()
        for grad, variable in zip(grads, variables, strict=True):
            variable.grad = grad
        self.step()

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Tensor | None, Tensor]]) -> None:
        """:meth:`apply` of pairs of a gradient and its variable."""
        pairs = list(grads_and_vars)
        self.apply([grad for grad, _ in pairs], [variable for _, variable in pairs])

    def minimize(self, loss: Tensor) -> None:
        """Clears the gradients, computes those of the scaled loss, and makes a :meth:`step`."""
        self.zero_grad()
        self.scale_loss(loss).backward()
        self.step()

    @property
    def dynamic_scale(self) -> float:
        """The scale. Synchronises with the device."""
        return self.scaler.get_scale()

    @property
    def step_counter(self) -> int:
        """Steps since the scale last changed. Synchronises with the device."""
        return self.scaler._get_growth_tracker()

    @property
    def learning_rate(self) -> float:
        """That of all groups, where it is the same; to be set as well."""
        rates = {float(group["lr"]) for group in self.param_groups}
        if len(rates) > 1:
            raise ValueError(
                f"LossScaleOptimizer.learning_rate: the groups have several, {sorted(rates)}: see "
                "param_groups"
            )
        return rates.pop()

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        for group in self.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    # ---- torch's interface ---------------------------------------------------------------------

    def step(self, closure: None = None) -> float | None:
        """``scaler.step(inner_optimizer)`` and ``scaler.update()``: unscales, makes or skips the
        step, and moves the scale.

        Raises:
            RuntimeError: a closure; a step before any :meth:`scale_loss`; ``scaler`` has unscaled
                or clipped this optimizer, not the inner one.
        """
        if closure is not None:
            raise RuntimeError("LossScaleOptimizer.step: closures are not supported")
        if self.scaler.is_enabled() and self.scaler._scale is None:
            raise RuntimeError(
                "LossScaleOptimizer.step: the gradients are of no scaled loss: call "
                "scale_loss(loss).backward() before"
            )
        if id(self) in self.scaler._optimizers:
            raise RuntimeError(
                "LossScaleOptimizer.step: the scaler has been given this optimizer, as to "
                "unscale_ or clip_grad_norm_: give it inner_optimizer, which it steps"
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
        """The inner optimizer's, which can load it, with one entry more: ``"loss_scale"``, the
        scaler's."""
        return {**self.inner_optimizer.state_dict(), _STATE: self.scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this class, or of the inner optimizer's: then the scale stays."""
        own = {key: value for key, value in state_dict.items() if key != _STATE}
        scale = state_dict.get(_STATE)
        if scale and self.scaler.is_enabled():
            GradScaler("cpu").load_state_dict(scale)  # raises for what the scaler cannot hold
        self.inner_optimizer.load_state_dict(own)
        if scale:
            self.scaler.load_state_dict(scale)

    def _variables(self) -> list[Tensor]:
        return [variable for group in self.param_groups for variable in group["params"]]

    def __getattr__(self, name: str) -> Any:
        """What else the inner optimizer has, such as its hooks."""
        if name == "inner_optimizer":  # while it is being loaded
            raise AttributeError(name)
        return getattr(self.inner_optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in _KEPT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __repr__(self) -> str:
        return f"LossScaleOptimizer({self.inner_optimizer!r})"
