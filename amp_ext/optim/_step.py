"""Make the step of this package's optimizers: one launch for each group, or torch's own step.

C++ (csrc/bindings/optim) reads ``param_groups`` and ``state`` anew for each step. Python chooses
between kernels and torch's step, and creates missing state.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from amp_ext._library import _C

MASTER = "master_param"
HALVES = (torch.float16, torch.bfloat16)
KEPT = (MASTER, "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
"""The tensors of a state that torch's load_state_dict would cast to the parameter's dtype."""

_WRAPPERS = (
    "torch.optim.optimizer",
    "torch.optim.lr_scheduler",
    "accelerate.optimizer",
    "amp_ext.compat.apex.optimizers",
)
"""Modules whose wrappers of a step do not touch gradients."""


class StepScalars(NamedTuple):
    """Hold the scaler's scalars of a step: float32 tensors of shape () on the scale's device.

    Attributes:
        found_inf: not 0 if the step is to be skipped.
        inv_scale: the factor that unscales gradients; None for unscaled gradients.
        norm: the norm of the unscaled gradients; None for gradients that are not to be clipped.
        max_norm: the limit of the norm.
    """

    found_inf: Tensor
    inv_scale: Tensor | None = None
    norm: Tensor | None = None
    max_norm: float | None = None


@dataclass(frozen=True)
class Storage:
    """Say how state is kept, where that differs from torch.

    Attributes:
        master_weights: whether 16-bit parameters have float32 masters.
        stochastic_rounding: whether bfloat16 moments, and parameters without masters, have it.
        dtypes: the dtypes of moments by name; None for the dtype of the master or the parameter.
    """

    master_weights: bool = False
    stochastic_rounding: bool = False
    dtypes: dict[str, torch.dtype | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, dtype in self.dtypes.items():
            if dtype not in (None, torch.float32, torch.bfloat16):
                raise ValueError(
                    f"{name}_dtype must be torch.float32, torch.bfloat16 or None, got {dtype!r}"
                )

    @property
    def is_torchs(self) -> bool:
        """Return whether torch's code keeps the same state."""
        own = (self.stochastic_rounding, self.master_weights, *self.dtypes.values())
        return not any(own)


class KernelStep(Optimizer):
    """Give :class:`Adam`, :class:`AdamW` and :class:`SGD` their step, beside torch's classes."""

    _step_scalars: StepScalars | None = None
    """Set by the scaler while it calls step()."""
    _storage = Storage()
    _kernel_step: Any
    _launch_name: str
    """The method of ``_C.OptimizerStep`` that launches the kernels."""

    def _options(self, group: dict[str, Any]) -> tuple[Any, ...]:
        """Return a group's options as the kernels take them."""
        raise NotImplementedError

    def _state_names(self, group: dict[str, Any]) -> list[str]:
        """Return the names of the states that a step of the group needs."""
        raise NotImplementedError

    def _why_option(self, group: dict[str, Any]) -> str | None:
        """Return the option of the group that kernels do not serve, or None."""
        if group["differentiable"]:
            return "differentiable=True"
        return "weight_decay is a tensor" if isinstance(group["weight_decay"], Tensor) else None

    def _use(self, storage: Storage) -> None:
        """Take the storage, at the end of a constructor."""
        self._storage, self._kernel_step = storage, _C.OptimizerStep()
        # torch sets this attribute for fused=True, and Lightning then refuses to clip. Only a step
        # by torch's code needs it.
        if self._why_options() is None:
            self.__dict__.pop("_step_supports_amp_scaling", None)

    # ---- the step --------------------------------------------------------------------------------

    @property
    def _is_observed(self) -> bool:
        """Return whether other code runs in step(): an override, a wrapper or a hook."""
        registries = (
            _global_optimizer_pre_hooks,
            _global_optimizer_post_hooks,
            self._optimizer_step_pre_hooks,
            self._optimizer_step_post_hooks,
        )
        hooks = (hook for registry in registries for hook in registry.values())
        is_hooked = not all(getattr(hook, "_counts_steps", False) for hook in hooks)
        return is_hooked or _unwrapped(self.step) is not KernelStep.step

    def _why_not(self) -> str | None:
        """Return why kernels cannot make the step of the present gradients, or None."""
        return self._why_options() or self._kernel_step.why_not(self.param_groups)

    def _scalars(self) -> StepScalars | None:
        """Return the scaler's scalars, with the ``grad_scale`` and ``found_inf`` that are set."""
        scalars = self._step_scalars
        grad_scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        if grad_scale is not None:
            grad_scale = torch.as_tensor(grad_scale, dtype=torch.float32)
            found_inf = torch.zeros_like(grad_scale) if found_inf is None else found_inf
        if scalars is None and found_inf is not None:
            scalars = StepScalars(torch.as_tensor(found_inf, dtype=torch.float32))
        if scalars is None or grad_scale is None:
            return scalars
        inv_scale = grad_scale.reciprocal()
        if scalars.inv_scale is not None:
            inv_scale = inv_scale.to(scalars.inv_scale.device) * scalars.inv_scale
        return scalars._replace(inv_scale=inv_scale)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters, by one launch for each group. The host waits for no device.

        Each process updates its local tensors of DTensors, after it has redistributed gradients
        with other placements. torch's code updates parameters with sparse gradients, and parameters
        that are complex, float64, of another tensor subclass or on several devices, or that share
        memory. It also updates parameters with ``differentiable=True``, with tensors for ``betas``
        or ``weight_decay``, and of a subclass with an ``_init_group`` of its own.

        If ``self.grad_scale`` and ``self.found_inf`` are set, the step divides gradients by the
        first tensor and does nothing where the second is 1, as torch's fused steps do.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        why = self._why_options() or self._launch()
        if why is not None:
            self._step_as_torch(why)
        return loss

    def _why_options(self) -> str | None:
        if getattr(self._init_group, "__func__", None) is not super()._init_group.__func__:
            return "_init_group is overridden"
        whys = (self._why_option(group) for group in self.param_groups)
        return next((why for why in whys if why is not None), None)

    @torch.no_grad()
    def _launch(self) -> str | None:
        """Make the step, or return why kernels cannot."""
        launch = getattr(self._kernel_step, self._launch_name)
        names = [self._state_names(group) for group in self.param_groups]
        for _ in range(2):
            refusal = launch(
                self.param_groups,
                self.state,
                names,
                [self._options(group) for group in self.param_groups],
                self._scalars(),
            )
            if not isinstance(refusal, list):
                return refusal
            # Each group's parameters with incomplete state.
            for params, needed in zip(refusal, names, strict=True):
                self._make_state(params, needed)
        raise RuntimeError(
            f"{type(self).__name__}.step: expected strided state tensors of the parameter's shape "
            "(DTensors for a DTensor parameter)"
        )

    def _step_as_torch(self, why: str) -> None:
        name = type(self).__name__
        if not self._storage.is_torchs:
            raise RuntimeError(
                f"{name}.step: kernels cannot make this step, and torch knows no master weights, "
                f"dtypes of moments or stochastic rounding: {why}. Leave these options out to have "
                "torch make it."
            )
        if self._step_scalars is not None:
            raise RuntimeError(
                f"{name}.step: clip_grad_norm_() has left unscaling and clipping to a step that "
                f"kernels can no longer make: {why}. Change options before clip_grad_norm_()."
            )
        _forget_skipped(self.param_groups, self.state)
        step = super().step.__func__
        # Hooks have been run.
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(self)

    # ---- state -----------------------------------------------------------------------------------

    def _make_state(self, params: Sequence[Tensor], needed: Sequence[str]) -> None:
        """Make missing states of parameters, and convert the others and gradients for kernels."""
        moments = [name for name in needed if name not in ("step", MASTER)]
        # A tensor that kernels can use keeps its memory, for captured graphs.
        for param in params:
            if _is_dtensor(param) and param.grad.placements != param.placements:
                grad = param.grad.detach()  # perhaps a sum over processes that is still to be made
                param.grad = grad.redistribute(param.device_mesh, param.placements)
            state = self.state[param]
            if "step" in needed:
                step = state.get("step", self._steps_before(param))
                if not isinstance(step, Tensor):
                    step = torch.full((), step, dtype=torch.float32, device=param.device)
                state["step"] = step.to(param.device, torch.float32)
            for name in moments:
                moment = state.get(name)
                if not isinstance(moment, Tensor):
                    state[name] = torch.zeros_like(param, dtype=self._moment_dtype(name, param))
                elif _is_alike(moment, param):
                    state[name] = _laid_out_as(param, moment)
            if MASTER in needed and param.dtype != torch.float32:
                master = state.get(MASTER)
                is_kept = isinstance(master, Tensor) and _is_alike(master, param)
                master = _laid_out_as(param, master if is_kept else param.detach())
                state[MASTER] = master.to(param.device, torch.float32)

    def _moment_dtype(self, name: str, param: Tensor) -> torch.dtype:
        has_master = self._storage.master_weights and param.dtype in HALVES
        dtype = self._storage.dtypes.get(name.removeprefix("max_"))
        return dtype or (torch.float32 if has_master else param.dtype)

    def _steps_before(self, param: Tensor) -> float:
        """Return how many updates a parameter without a ``step`` has had."""
        return 0.0

    # ---- checkpoints -----------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_storage": self._storage}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._kernel_step = _C.OptimizerStep()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of torch's or of this package's optimizer.

        Moments get the dtypes of this optimizer, and masters float32, from the saved values. The
        next step makes masters that are missing, and replaces elements that do not round to their
        parameter's.
        """
        saved: dict[str, Any] = {}
        # After the user's hooks on the way in, and before them on the way out.
        handles = [
            self.register_load_state_dict_pre_hook(lambda _, state: saved.update(state)),
            self.register_load_state_dict_post_hook(lambda _: self._restore(saved), prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _restore(self, saved: dict[str, Any]) -> None:
        """Replace the tensors that torch has cast to the dtypes of parameters."""
        indices = (index for group in saved["param_groups"] for index in group["params"])
        params = (param for group in self.param_groups for param in group["params"])
        for index, param in zip(indices, params, strict=True):
            state = self.state.get(param, {})
            for name, value in saved["state"].get(index, {}).items():
                if name in KEPT and isinstance(value, Tensor):
                    state[name] = value.to(param.device, self._moment_dtype(name, param))
            if not self._storage.master_weights:
                state.pop(MASTER, None)  # it would be out of date after the next step

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state, and masters.

        As in torch, a ``step`` is on the CPU, unless its group is ``fused`` or ``capturable``.
        """
        handle = self.register_state_dict_post_hook(KernelStep._finish_saved, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def _finish_saved(self, saved: dict[str, Any]) -> None:
        """Put copies in the place of states, with what torch's optimizer would have."""
        groups = [g for g in saved["param_groups"] if g.get("fused") or g.get("capturable")]
        on_device = {index for group in groups for index in group["params"]}
        for index, state in saved["state"].items():
            if isinstance(state, dict):
                saved["state"][index] = state = dict(state)
                if index not in on_device and isinstance(state.get("step"), Tensor):
                    state["step"] = state["step"].cpu()
        _forget_skipped(saved["param_groups"], saved["state"])


def _forget_skipped(groups: Any, states: Any) -> None:
    """Drop the zero momentum of skipped steps: torch dampens each update that finds a momentum."""
    dampened = (key for group in groups if group.get("dampening") for key in group["params"])
    for state in (states.get(key, {}) for key in dampened):
        if state.get("step") == 0:
            state.pop("momentum_buffer", None)
            del state["step"]  # made anew after an update: see _steps_before


def _unwrapped(step: Any) -> Any:
    """Return the function within the wrappers that do not touch gradients."""
    while True:
        step = getattr(step, "__func__", step)
        # functools.wraps copies a function's names and attributes, but not its globals.
        module = getattr(step, "__globals__", {}).get("__name__")
        if module not in _WRAPPERS or not hasattr(step, "__wrapped__"):
            return step
        step = step.__wrapped__


def _is_dtensor(tensor: Tensor) -> bool:
    return hasattr(tensor, "placements")


def _is_alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and _is_dtensor(a) == _is_dtensor(b)


def _laid_out_as(param: Any, tensor: Any) -> Tensor:
    """Return the tensor, or a copy with the parameter's sharding and strides."""
    if _is_dtensor(param):
        if (tensor.device_mesh, tensor.placements) != (param.device_mesh, param.placements):
            tensor = tensor.redistribute(param.device_mesh, param.placements)
        order, wanted = tensor.to_local().stride(), param.to_local().stride()
    else:
        order, wanted = tensor.stride(), param.stride()
    if order == wanted:
        return tensor
    return torch.empty_like(param, dtype=tensor.dtype).copy_(tensor)
