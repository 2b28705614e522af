"""Inputs for the tests of the optimizers and their ops, and the comparisons."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

import reference
from cases import assert_all_same, copies, surroundings, tensors
from executors import Executor
from twins import params

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
Values = dict[str, Any]

OPTIONS: dict[str, Values] = {
    "adam_": {
        **{"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8},
        **{"weight_decay": 0.1, "decoupled": True},
    },
    "sgd_": {
        **{"lr": 0.1, "momentum": 0.9, "dampening": 0.0},
        **{"nesterov": False, "weight_decay": 0.1},
    },
}
OPS = tuple(OPTIONS)


def copied(values: Values) -> Values:
    """Return the arguments with copies of the tensors, and of the memory around them."""
    return tree_map_only(Tensor, lambda tensor: copies([tensor])[0], values)


def check(executor: Executor, op: str, values: Values) -> None:
    """Compare with the oracle all tensors after a call, and the memory around them."""
    expected = copied(values)
    getattr(reference, op)(**expected)
    getattr(executor.ops, op)(**values)
    assert_all_same(map(surroundings, tensors(values)), map(surroundings, tensors(expected)))


def placed(values: Tensor, offset: int) -> Tensor:
    """Return a copy that begins `offset` elements into its storage."""
    whole = torch.full((values.numel() + offset + 3,), 42.0, dtype=values.dtype)
    view = whole[offset : offset + values.numel()].as_strided(values.shape, values.stride(), offset)
    return view.copy_(values).to(values.device)


def state_of(
    op: str,
    params: Sequence[Tensor],
    *,
    dtypes: Sequence[torch.dtype] = (FP32, FP32),
    amsgrad: bool = False,
    momentum: bool = True,
) -> Values:
    """Return random state of parameters after some updates."""

    def moments(dtype: torch.dtype) -> list[Tensor]:
        return [torch.empty_like(p, dtype=dtype).copy_(torch.randn_like(p)) for p in params]

    device = params[0].device
    steps = [torch.tensor(float(3 * i), device=device) for i in range(len(params))]
    if op == "sgd_":
        return {"momentum_buffers": moments(dtypes[0]) if momentum else None, "steps": steps}
    state: Values = {"exp_avgs": moments(dtypes[0]), "steps": steps}
    state["exp_avg_sqs"] = [x.square_() for x in moments(dtypes[1])]
    if amsgrad:
        state["max_exp_avg_sqs"] = [x.square_() for x in moments(dtypes[1])]
    return state


def call(
    executor: Executor,
    op: str,
    shapes: Sequence[tuple[int, ...]] = ((19,), (40, 3), ()),
    dtype: torch.dtype = FP32,
    grad_dtype: torch.dtype = FP32,
    state: Values | None = None,
    **options: Any,
) -> Values:
    """Return the arguments of a call on random parameters and gradients."""
    params = [torch.randn(shape).to(executor.device, dtype) for shape in shapes]
    grads = [torch.randn(shape).to(executor.device, grad_dtype) for shape in shapes]
    values = {"params": params, "grads": grads, **state_of(op, params, **(state or {}))}
    return {**values, **OPTIONS[op], **options}


SHAPES = ((5, 3), (7,), (), (2, 3, 4), (0,), (1025,))
LR = 0.01
OPTIMIZERS: dict[str, tuple[str, Values]] = {
    "adam": ("Adam", {}),
    "adam_l2": ("Adam", {"weight_decay": 0.1, "maximize": True}),
    "amsgrad": ("Adam", {"amsgrad": True, "betas": (0.5, 0.9), "eps": 1e-3}),
    "adam_decoupled": ("Adam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "adamw": ("AdamW", {}),
    "adamw_amsgrad": ("AdamW", {"amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    "sgd": ("SGD", {"weight_decay": 0.1}),
    "momentum": ("SGD", {"momentum": 0.9, "maximize": True}),
    "dampening": ("SGD", {"momentum": 0.9, "dampening": 0.5}),
    "nesterov": ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
}


def make(module: Any, case: str, device: Any = "cpu", dtype: Any = FP32, **more: Any) -> Any:
    """Return an optimizer of a module, amp_ext.optim or torch.optim."""
    name, options = OPTIMIZERS[case]
    return getattr(module, name)(params_of(dtype=dtype, device=device), lr=LR, **options, **more)


def params_of(
    shapes: Iterable[Sequence[int]] = SHAPES,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> list[torch.nn.Parameter]:
    """Return parameters of magnitudes from 1/2 to 2, equal for equal seeds."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(_numbers(shape, generator).to(device, dtype)) for shape in shapes]


def set_grads(params: Sequence[Tensor], seed: int, scale: float = 1.0) -> None:
    """Set gradients of magnitudes from 1/2 to 2, times the scale."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for param in params:
        param.grad = (_numbers(param.shape, generator) * scale).to(param)


def _numbers(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    sizes = torch.rand(shape, generator=generator) * 1.5 + 0.5
    return sizes * (torch.randint(0, 2, shape, generator=generator) * 2 - 1)


def train(optimizer: Optimizer, steps: Iterable[int]) -> None:
    """Step once for each number; a number determines the gradients."""
    for i in steps:
        set_grads(params(optimizer), i)
        optimizer.step()


def tolerance(steps: int, lr: float) -> float:
    """Return the bound of float32 parameters' differences after some steps of two implementations.

    Let u = 2**-24. An update rounds |param| < 4 twice, in each of both implementations. Moments and
    corrections of step n have seen less than 4n + 8 roundings, relative to gradients of at most 3
    (with weight decay). The root of a second moment of at least 1/3 divides them: the update's
    error is below lr * 9 * (4n + 8) * u. SGD's divisor is 1.
    """
    u = 2.0**-24
    return 2 * sum(2 * 4 * u + lr * 9 * (4 * n + 8) * u for n in range(1, steps + 1))


def assert_close(ours: Sequence[Tensor], torchs: Sequence[Tensor], most: float) -> None:
    for mine, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=most)


def bits(optimizer: Optimizer) -> list[Any]:
    """Return copies of all tensors that a step writes."""
    written = [(param.detach(), optimizer.state.get(param, {})) for param in params(optimizer)]
    return tree_map_only(Tensor, Tensor.clone, written)


def assert_same_bits(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
