"""Example arguments of every op, for ``python -m amp_ext`` and the tests."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def arguments(op: str, device: torch.device | str = "cpu") -> dict[str, Any]:
    """An example of an op's arguments: valid, and with results that every backend has bit by bit.

    Args:
        op: its name in `amp_ext.ops`.
        device: where the tensors lie.

    Returns:
        New tensors and numbers, by parameter; none of the tensors is left out.
    """

    def full(value: float, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    def integers(*shape: int) -> Tensor:
        count = torch.arange(math.prod(shape), dtype=torch.float32, device=device)
        return count.remainder(5).sub(2.0).view(shape)

    x, weight, bias, sums = integers(2, 3, 4), integers(5, 4).half(), integers(5), integers(2, 3, 5)
    relu, operands = {"activation": "relu"}, {"a": x, "b": weight, "trans_b": True}
    scaled = {"alpha": 2.0, "beta": -1.0, "out_dtype": torch.float32}
    gemm = {**operands, "c": integers(3, 1).double(), "bias": bias, **scaled, **relu}
    grads = [full(4.0, 19), full(2.0, 2, 4, dtype=torch.float16).t(), full(12.0).double()]
    checked = {"grads": grads, "found_inf": full(0.0), "inv_scale": full(0.5)}
    step = {
        "params": [full(4.0, 19), full(3.0, 3, 2), full(-2.0, 2, 4).t()],
        "grads": [full(4.0, 19), full(12.0, 3, 2).bfloat16(), full(2.0, 4, 2).half()],
        "steps": [full(0.0), full(1.0), full(7.0)],
        "copies": [full(0.0, 19).half(), full(0.0, 3, 2).bfloat16(), full(0.0, 2, 4).half().t()],
        **{"lr": 0.1, "weight_decay": 0.01, "maximize": True, "stochastic_rounding": True},
        **{"tensor_lr": full(0.25), "found_inf": full(0.0), "inv_scale": full(0.5)},
        **{"norm": full(3.0), "max_norm": 2.0},
    }

    def moments(value: float) -> list[Tensor]:
        return [full(value, 19), full(value, 3, 2).bfloat16(), full(value, 2, 4).t()]

    betas = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "decoupled": True}
    moved = {"momentum": 0.9, "dampening": 0.1, "nesterov": False}
    return {
        "adam_": {
            **{**step, **betas, "exp_avgs": moments(0.5), "exp_avg_sqs": moments(0.25)},
            "max_exp_avg_sqs": moments(0.3),
        },
        "sgd_": {**step, **moved, "momentum_buffers": moments(0.5)},
        "unscale_": {**checked, "norm": full(3.0), "max_norm": 2.0},
        "check_finite": {"grads": [*grads, full(math.inf)], "found_inf": full(0.0)},
        "grad_norm": {**checked, "norms": full(0.0, 3)},
        "update_scale_": {
            "scale": full(4.0),
            "growth_tracker": full(0, dtype=torch.int32),
            "found_infs": [full(0.0), full(1.0), full(0.0)],
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 1,
            "hysteresis": 2,
            "hysteresis_tracker": full(1, dtype=torch.int32),
            "skipped_steps": full(0, dtype=torch.int64),
            "next_step": full(1.0, 3),
        },
        "cast_": {
            "outputs": [torch.zeros_like(grad, dtype=torch.bfloat16) for grad in grads],
            "inputs": grads,
        },
        "gemm": gemm,
        "gemm_with_aux": gemm,
        "gemm_times_derivative": {**operands, "aux": sums.half(), **relu},
        "gemm_accumulate_": {"c": sums, **operands, "alpha": 2.0},
        "linear": {"x": x, "weight": weight, "bias": bias, **relu},
        "mlp": {
            **{"x": x, "weight1": weight, "bias1": bias},
            **{"weight2": integers(5, 5).half(), "bias2": bias.clone(), **relu},
        },
        "gated_mlp": {
            **{"x": x, "gate_weight": weight, "gate_bias": bias},
            **{"up_weight": weight.clone(), "up_bias": bias.clone()},
            **{"down_weight": integers(5, 5).half(), "down_bias": bias.clone(), **relu},
        },
    }[op]
