"""Adam, AdamW and SGD: torch's arguments, and what the kernels are given of them."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from amp_ext.optim._step import HALVES, KernelStep, Storage


class _AdamStep(KernelStep):
    def _state_names(self, group: dict[str, Any]) -> list[str]:
        names = ["step", "exp_avg", "exp_avg_sq"]
        if group["amsgrad"]:
            names.append("max_exp_avg_sq")
        return names + self._storage.names()

    def _why_option(self, group: dict[str, Any]) -> str | None:
        if group["differentiable"]:
            return "differentiable=True"
        if any(isinstance(beta, Tensor) for beta in group["betas"]):
            return "betas are tensors"
        return "weight_decay is a tensor" if isinstance(group["weight_decay"], Tensor) else None

    def _launch_groups(
        self, names: list[list[str]], renewed: bool
    ) -> str | list[list[Tensor]] | None:
        return self._kernels().adam(
            self.param_groups,
            self.state,
            names,
            renewed,
            [
                (
                    group["lr"],
                    *group["betas"],
                    group["eps"],
                    group["weight_decay"],
                    group["decoupled_weight_decay"],
                    group["maximize"],
                )
                for group in self.param_groups
            ],
            self._storage.stochastic_rounding,
            self._scalars(),
        )


class Adam(_AdamStep, torch.optim.Adam):
    """``torch.optim.Adam`` by one launch for each group of parameters.

    A step that :class:`amp_ext.GradScaler` calls unscales, clips and skips by itself: gradients are
    read once, scaled as they are, and the host does not wait.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize, decoupled_weight_decay: as in
            torch. A tensor ``lr`` is read on the device, at every step and replay of a CUDA graph.
        foreach, capturable, fused: as in torch, for checkpoints and for the steps that are torch's
            to make (see :meth:`step`). The kernels are fused and capturable whatever these say.
        differentiable: True leaves all steps to torch.
        master_weights: keep a float32 master of each float16 and bfloat16 parameter, as
            ``state["master_param"]``: the step updates the master and writes the parameter rounded.
            A parameter that something else has written since, other than by ``.data``, is taken
            over by its master. Without masters, it is updated in place, as in torch.
        exp_avg_dtype, exp_avg_sq_dtype: torch.float32 or torch.bfloat16; None for that of what is
            updated, the master or the parameter. ``max_exp_avg_sq`` has that of ``exp_avg_sq``.
        stochastic_rounding: round bfloat16 moments, and bfloat16 parameters without masters, up or
            down with the probability that makes the mean exact. The same step of the same numbers
            rounds the same way.
        autocast_copies: torch.float16 or torch.bfloat16: the step also writes a copy of each
            float32 parameter, which :class:`amp_ext.autocast` of that dtype then uses in the place
            of a cast. A parameter that something else has written since is cast as ever, other than
            by ``.data`` to the same memory, which nobody can see: not for programs that do so
            between steps, as some do to average weights. A backward pass through a region before
            the step is an error after it, as through weights themselves. None for no copies, as is
            needed for DTensors.

    Raises:
        ValueError: as in torch; a dtype of moments or copies that is none of these.
        RuntimeError: by :meth:`step`, where kernels cannot make it and torch does not know the
            options, such as copies of DTensors.
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
        autocast_copies: torch.dtype | None = None,
    ) -> None:
        dtypes = _checked_dtypes(exp_avg=exp_avg_dtype, exp_avg_sq=exp_avg_sq_dtype)
        if exp_avg_sq_dtype is not None:
            dtypes["max_exp_avg_sq"] = exp_avg_sq_dtype
        storage = _storage(master_weights, dtypes, stochastic_rounding, autocast_copies)
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
        self._use(storage)


class AdamW(_AdamStep, torch.optim.AdamW):
    """``torch.optim.AdamW`` by one launch for each group of parameters.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as in torch.
        foreach, capturable, differentiable, fused, master_weights, exp_avg_dtype, exp_avg_sq_dtype,
            stochastic_rounding, autocast_copies: as for :class:`Adam`.

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
        autocast_copies: torch.dtype | None = None,
    ) -> None:
        dtypes = _checked_dtypes(exp_avg=exp_avg_dtype, exp_avg_sq=exp_avg_sq_dtype)
        if exp_avg_sq_dtype is not None:
            dtypes["max_exp_avg_sq"] = exp_avg_sq_dtype
        storage = _storage(master_weights, dtypes, stochastic_rounding, autocast_copies)
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
        self._use(storage)


class SGD(KernelStep, torch.optim.SGD):
    """``torch.optim.SGD`` by one launch for each group of parameters.

    With dampening, or stochastic rounding, the state has a ``step``, which torch's has not: the
    first update of a parameter is not dampened, and one that was skipped is none.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch. A tensor
            ``lr`` is read on the device.
        foreach, differentiable, fused, master_weights, stochastic_rounding, autocast_copies: as for
            :class:`Adam`.
        momentum_buffer_dtype: as ``exp_avg_dtype`` of :class:`Adam`.

    Raises:
        ValueError: as :class:`Adam`.
    """

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
        autocast_copies: torch.dtype | None = None,
    ) -> None:
        dtypes = _checked_dtypes(momentum_buffer=momentum_buffer_dtype)
        storage = _storage(master_weights, dtypes, stochastic_rounding, autocast_copies)
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
        self._use(storage)

    def _state_names(self, group: dict[str, Any]) -> list[str]:
        moves = bool(group["momentum"])  # a comparison may be np.bool_, or a tensor
        counts = (moves and bool(group["dampening"])) or self._storage.stochastic_rounding
        return ["step"] * counts + ["momentum_buffer"] * moves + self._storage.names()

    def _why_option(self, group: dict[str, Any]) -> str | None:
        if group["differentiable"]:
            return "differentiable=True"
        return "weight_decay is a tensor" if isinstance(group["weight_decay"], Tensor) else None

    def _steps_before(self, param: Tensor) -> float:
        return 0.0 if self.state[param].get("momentum_buffer") is None else 1.0

    def _launch_groups(
        self, names: list[list[str]], renewed: bool
    ) -> str | list[list[Tensor]] | None:
        return self._kernels().sgd(
            self.param_groups,
            self.state,
            names,
            renewed,
            [
                (
                    group["lr"],
                    group["momentum"],
                    group["dampening"],
                    group["weight_decay"],
                    group["nesterov"],
                    group["maximize"],
                )
                for group in self.param_groups
            ],
            self._storage.stochastic_rounding,
            self._scalars(),
        )


def _storage(
    master_weights: bool,
    dtypes: dict[str, torch.dtype],
    stochastic_rounding: bool,
    autocast_copies: torch.dtype | None,
) -> Storage:
    if autocast_copies not in (None, *HALVES):
        raise ValueError(
            "autocast_copies must be torch.float16, torch.bfloat16 or None, "
            f"got {autocast_copies!r}"
        )
    return Storage(master_weights, dtypes, stochastic_rounding, autocast_copies)


def _checked_dtypes(**dtypes: torch.dtype | None) -> dict[str, torch.dtype]:
    for name, dtype in dtypes.items():
        if dtype not in (None, torch.float32, torch.bfloat16):
            raise ValueError(
                f"{name}_dtype must be torch.float32, torch.bfloat16 or None, got {dtype}"
            )
    return {name: dtype for name, dtype in dtypes.items() if dtype is not None}
