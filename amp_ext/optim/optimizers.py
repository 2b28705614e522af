"""Define Adam, AdamW and SGD: torch's arguments, and the arguments of the kernels."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from amp_ext.optim._step import MASTER, KernelStep, Storage

# The constructors spell torch's arguments out for editors and type checkers.


class _AdamStep(KernelStep):
    _launch_name = "adam"

    def _state_names(self, group: dict[str, Any]) -> list[str]:
        names = ["step", "exp_avg", "exp_avg_sq"]
        if group["amsgrad"]:
            names.append("max_exp_avg_sq")
        return names + [MASTER] * self._storage.master_weights

    def _why_option(self, group: dict[str, Any]) -> str | None:
        if any(isinstance(beta, Tensor) for beta in group["betas"]):
            return "betas are tensors"
        return super()._why_option(group)

    def _options(self, group: dict[str, Any]) -> tuple[Any, ...]:
        names = ("eps", "weight_decay", "decoupled_weight_decay", "maximize")
        options = (group["lr"], *group["betas"], *(group[name] for name in names))
        return (*options, self._storage.stochastic_rounding)


class Adam(_AdamStep, torch.optim.Adam):
    """Run ``torch.optim.Adam`` by one launch for each group of parameters.

    A step that :class:`amp_ext.GradScaler` calls unscales, clips and skips by itself: it reads the
    scaled gradients once, and the host does not wait.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize, decoupled_weight_decay: as in
            torch. A tensor ``lr`` is read on the device, at every step and replay of a CUDA graph.
        foreach, capturable, fused: as in torch, for checkpoints and for steps by torch's code (see
            :meth:`step`). The kernels are fused and capturable whatever these say.
        differentiable: True leaves all steps to torch.
        master_weights: keep a float32 master of each float16 and bfloat16 parameter, as
            ``state["master_param"]``: the step updates the master and rounds it to the parameter.
            An element of the parameter that other code has changed since, in whatever way, replaces
            the master's. Without masters, parameters are updated in place.
        exp_avg_dtype, exp_avg_sq_dtype: torch.float32 or torch.bfloat16; None for the dtype of the
            master or the parameter. ``max_exp_avg_sq`` has the dtype of ``exp_avg_sq``.
        stochastic_rounding: round bfloat16 moments, and bfloat16 parameters without masters,
            stochastically. The same step of the same numbers rounds the same way.

    Raises:
        ValueError: as in torch; another dtype of moments.
        RuntimeError: :meth:`step` cannot run kernels, and torch does not know the options.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        master_weights: bool = False,
        exp_avg_dtype: torch.dtype | None = None,
        exp_avg_sq_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
    ) -> None:
        dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )
        self._use(Storage(master_weights, stochastic_rounding, dtypes))


class AdamW(_AdamStep, torch.optim.AdamW):
    """Run ``torch.optim.AdamW`` by one launch for each group of parameters.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as in torch.
        foreach, capturable, differentiable, fused, master_weights, exp_avg_dtype, exp_avg_sq_dtype,
            stochastic_rounding: as for :class:`Adam`.

    Raises:
        ValueError: as :class:`Adam`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: bool = False,
        exp_avg_dtype: torch.dtype | None = None,
        exp_avg_sq_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
    ) -> None:
        dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        self._use(Storage(master_weights, stochastic_rounding, dtypes))


class SGD(KernelStep, torch.optim.SGD):
    """Run ``torch.optim.SGD`` by one launch for each group of parameters.

    With dampening or stochastic rounding, the state also has a ``step``: the first update of a
    parameter is not dampened, and a skipped step is no update.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch. A tensor
            ``lr`` is read on the device.
        foreach, differentiable, fused, master_weights, stochastic_rounding: as for :class:`Adam`.
        momentum_buffer_dtype: as ``exp_avg_dtype`` of :class:`Adam`.

    Raises:
        ValueError: as :class:`Adam`.
    """

    _launch_name = "sgd"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: bool = False,
        momentum_buffer_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
    ) -> None:
        dtypes = {"momentum_buffer": momentum_buffer_dtype}
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
        )
        self._use(Storage(master_weights, stochastic_rounding, dtypes))

    def _state_names(self, group: dict[str, Any]) -> list[str]:
        moves = bool(group["momentum"])  # a plain bool, since lists are multiplied by it
        counts = (moves and bool(group["dampening"])) or self._storage.stochastic_rounding
        masters = self._storage.master_weights
        return ["step"] * counts + ["momentum_buffer"] * moves + [MASTER] * masters

    def _steps_before(self, param: Tensor) -> float:
        return 0.0 if self.state[param].get("momentum_buffer") is None else 1.0

    def _options(self, group: dict[str, Any]) -> tuple[Any, ...]:
        names = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
        return (*(group[name] for name in names), self._storage.stochastic_rounding)
