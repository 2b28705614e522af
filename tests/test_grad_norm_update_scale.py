"""amp_ext::grad_norm_update_scale_: grad_norm and update_scale_, bit for bit, in one launch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import FLOATS, assert_all_same, random, unwritten
from executors import Executor, every_kernel_executor


def state(executor: Executor, tracker: int) -> dict[str, Tensor]:
    return {
        "found_inf": executor.scalar(0.0),
        "scale": executor.scalar(1024.0),
        "growth_tracker": executor.scalar(tracker, torch.int32),
        "hysteresis_tracker": executor.scalar(2, torch.int32),
        "skipped_steps": executor.scalar(0, torch.int64),
    }


@every_kernel_executor
@pytest.mark.parametrize("count", [0, 3, 1500])
@pytest.mark.parametrize("value", [1.0, math.inf, math.nan])
@pytest.mark.parametrize("already", [0.0, 1.0])
@pytest.mark.parametrize("with_norms", [False, True])
def test_is_the_two_ops_in_turn(
    executor: Executor, count: int, value: float, already: float, with_norms: bool
) -> None:
    count = executor.length(count)
    grads = [random((5 + i % 300,), FLOATS[i % 4], executor.device) for i in range(count)]
    if grads:
        grads[-1][-1] = value
    options: dict[str, Any] = {"hysteresis": 2, "min_scale": 1.0, "max_scale": 1536.0}
    factors = (2.0, 0.5, 3)
    inv_scale = executor.scalar(2.0**-10)
    results = []
    for fused in (False, True):
        tensors = state(executor, tracker=1)
        tensors["found_inf"].fill_(already)
        norms = torch.full((count,), -1.0, device=executor.device) if with_norms else None
        rest = {name: tensors[name] for name in ("hysteresis_tracker", "skipped_steps")} | options
        moved = tensors["scale"], tensors["growth_tracker"]
        found_inf = tensors["found_inf"]
        for _ in range(3):
            with unwritten(grads):
                if fused:
                    norm = executor.ops.grad_norm_update_scale_(
                        grads, found_inf, inv_scale, *moved, *factors, norms=norms, **rest
                    )
                else:
                    norm = executor.ops.grad_norm(grads, found_inf, inv_scale, norms=norms)
                    executor.ops.update_scale_(*moved, [found_inf], *factors, **rest)
        results.append([norm, *tensors.values(), *([] if norms is None else [norms])])
    assert_all_same(*results)
    overflow = already or (count and not math.isfinite(value))
    assert results[0][1].item() == float(bool(overflow))
    assert results[0][5].item() == (3 if overflow else 0)
