"""The steps of amp_ext.optim by the ops of updates: what csrc/bindings/optim does, by a loop in
Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from amp_ext._python import triton, updates
from amp_ext._python.checks import HALVES, is_dense, same_order

MASTER, COPY = "master_param", "autocast_copy"
ADAM_STATES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_NO_KERNELS = "amp_ext has no kernels for it here, being installed without its extension module"

Groups = list[dict[str, Any]]
Missing = list[list[Tensor]]
NoStep = str | Missing
"""Why kernels cannot make the step, or the parameters of each group whose state is incomplete."""


def is_plain(tensor: Any) -> bool:
    """Whether it is no tensor subclass but a parameter."""
    return type(tensor) in (Tensor, nn.Parameter, nn.Buffer)


def why_not_grad(tensor: Tensor, device: torch.device) -> str | None:
    if not is_plain(tensor):
        return "is a tensor subclass"
    if tensor.layout is not torch.strided:
        return "is not strided"
    if tensor.dtype not in (torch.float32, *HALVES):
        return "is not float32, float16 or bfloat16"
    if tensor.device != device:
        return "is on another device than the first parameter"
    return None


def why_not_param(param: Tensor, device: torch.device) -> str | None:
    if why := why_not_grad(param, device):
        return why
    if device.type not in ("cpu", "cuda"):
        return "is neither on the CPU nor on a CUDA device"
    return None if is_dense(param) else "has holes in memory"


class OptimizerStep:
    """A step of an optimizer.

    Args:
        by_torch: whether torch can make it, which is then faster than the oracle's arithmetic: only
            Triton's kernels do it in its place.
    """

    def __init__(self, by_torch: bool) -> None:
        self._by_torch = by_torch
        self._written: dict[int, tuple[int, int]] = {}
        """Memory and version of the parameters that have masters or copies, by their id, as the
        last step left them."""

    def why_not(self, groups: Groups) -> str | None:
        """Why kernels cannot make the step that is due, if so."""
        params = [param for group in groups for param in group["params"]]
        if not params:
            return None
        device = params[0].device
        if self._by_torch and not triton.serves("adam", device):
            return _NO_KERNELS
        for number, group in enumerate(groups):
            for index, param in enumerate(group["params"]):
                name = f"param_groups[{number}]['params'][{index}]"
                if not is_plain(param):
                    return f"{name} is a tensor subclass"
                if param.grad is None:
                    continue
                if why := why_not_param(param, device):
                    return f"{name} {why}"
                if why := why_not_grad(param.grad, device):
                    return f"the gradient of {name} {why}"
        return None

    def adam(
        self,
        groups: Groups,
        state: dict[Any, Any],
        needed: Sequence[Sequence[str]],
        renewed: bool,
        options: Iterable[tuple[Any, ...]],
        by_chance: bool,
        scalars: Any,
    ) -> NoStep | None:
        names = "lr", "beta1", "beta2", "eps", "weight_decay", "decoupled", "maximize"
        columns = {name: f"{name}s" for name in ADAM_STATES} | {"step": "steps"}
        given = [dict(zip(names, of_group, strict=True)) for of_group in options]
        return self._step(
            updates.adam_, columns, groups, state, needed, renewed, given, by_chance, scalars
        )

    def sgd(
        self,
        groups: Groups,
        state: dict[Any, Any],
        needed: Sequence[Sequence[str]],
        renewed: bool,
        options: Iterable[tuple[Any, ...]],
        by_chance: bool,
        scalars: Any,
    ) -> NoStep | None:
        names = "lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"
        columns = {"momentum_buffer": "momentum_buffers", "step": "steps"}
        given = [dict(zip(names, of_group, strict=True)) for of_group in options]
        return self._step(
            updates.sgd_, columns, groups, state, needed, renewed, given, by_chance, scalars
        )

    @torch.no_grad()
    def _step(
        self,
        op: Any,
        columns: dict[str, str],
        groups: Groups,
        state: dict[Any, Any],
        needed: Sequence[Sequence[str]],
        renewed: bool,
        options: Sequence[dict[str, Any]],
        by_chance: bool,
        scalars: Any,
    ) -> NoStep | None:
        if why := self.why_not(groups):
            return why
        calls, missing = [], []
        for group, names, of_group in zip(groups, needed, options, strict=True):
            params = [param for param in group["params"] if param.grad is not None]
            incomplete = [p for p in params if not self._is_complete(p, state, names, renewed)]
            missing.append(incomplete)
            if params and not incomplete:
                calls.append((params, _lists(params, state, names, columns), of_group))
        if any(missing):
            return missing
        for _, lists, of_group in calls:
            device = lists["params"][0].device
            rates = _learning_rate(of_group.pop("lr"), device)
            op(**lists, **of_group, **rates, **_on(device, scalars), stochastic_rounding=by_chance)
        for params, lists, _ in calls:
            self._finish(params, lists, state)
        return None

    def _is_complete(
        self, param: Tensor, state: dict[Any, Any], names: Sequence[str], renewed: bool
    ) -> bool:
        values = state.get(param, {})
        for name in names:
            if name in (MASTER, COPY):
                if (param.dtype == torch.float32) == (name == MASTER):
                    continue
                if not renewed and self._written.get(id(param)) != _memory(param):
                    return False
            tensor = values.get(name)
            if not isinstance(tensor, Tensor) or not is_plain(tensor):
                return False
            if name == "step":
                if tensor.dtype != torch.float32 or tensor.numel() != 1:
                    return False
                if tensor.device != param.device:
                    return False
            elif tensor.shape == param.shape and not same_order(tensor, param):
                return False
        return True

    def _finish(
        self, params: Sequence[Tensor], lists: dict[str, Any], state: dict[Any, Any]
    ) -> None:
        for param, updated in zip(params, lists["params"], strict=True):
            if updated is not param or COPY in state[param]:
                self._written[id(param)] = _memory(param)


def _memory(param: Tensor) -> tuple[int, int]:
    return param.data_ptr(), 0 if param.is_inference() else param._version


def _lists(
    params: Sequence[Tensor],
    state: dict[Any, Any],
    names: Sequence[str],
    columns: dict[str, str],
) -> dict[str, Any]:
    """The op's lists. A master is what is updated, and its parameter is the copy."""
    updated, copies = [], []
    for param in params:
        master = state[param][MASTER] if MASTER in names and param.dtype in HALVES else None
        updated.append(param if master is None else master)
        has_copy = COPY in names and param.dtype == torch.float32
        copies.append(param if master is not None else state[param][COPY] if has_copy else None)
    lists = {"params": updated, "grads": [param.grad for param in params]}
    for name, column in columns.items():
        if name in names:
            lists[column] = [state[param][name] for param in params]
    if any(copy is not None for copy in copies):
        lists["copies"] = copies
    return lists


def _learning_rate(lr: float | Tensor, device: torch.device) -> dict[str, Any]:
    if not isinstance(lr, Tensor):
        return {"lr": float(lr)}
    if lr.device.type == "cpu" and device.type != "cpu":
        return {"lr": lr.item()}
    return {"lr": 0.0, "tensor_lr": lr.to(device, torch.float32).reshape(())}


def _on(device: torch.device, scalars: Any) -> dict[str, Any]:
    if scalars is None:
        return {}
    found_inf, inv_scale, norm, max_norm = scalars
    tensors = {"found_inf": found_inf, "inv_scale": inv_scale, "norm": norm}
    moved = {
        name: None if t is None else t.to(device, torch.float32, device.type != "cpu")
        for name, t in tensors.items()
    }
    return moved | {"max_norm": max_norm}
