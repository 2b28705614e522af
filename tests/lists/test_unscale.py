"""Test amp_ext::unscale_: values bit for bit, and the overflow flag, on every executor."""

import math

import pytest
import torch

from cases import FLOATS, NON_FINITE, assert_all_same, assert_same, bits, copies, patterns, random
from executors import Executor, every_executor

# 1.5 gives products half-way between two 16-bit values, 2**-140 is subnormal.
FACTORS = (1.0, 1.5, 2.0**-16, 1 / 3, -0.7, 0.0, 2.0**-140, 1e30, math.inf, math.nan)


@every_executor
@pytest.mark.parametrize("length", [300_000, 7], ids=["whole", "short-tensors"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_equals_torch(executor: Executor, dtype: torch.dtype, length: int) -> None:
    """Bit patterns are unscaled, also in tensors too short for vectors; results are judged."""
    for factor in FACTORS if length > 7 else (1.5,):
        expected = executor.some(patterns(dtype, torch.device("cpu")).split(length)[::256], 100)
        grads = [grad.to(executor.device, copy=True) for grad in expected]
        found_inf = executor.scalar(0.0)
        torch._amp_foreach_non_finite_check_and_unscale_(
            expected, torch.tensor(0.0), torch.tensor(factor)
        )
        executor.ops.unscale_(grads, found_inf, executor.scalar(factor))
        assert_all_same(grads, expected)
        assert found_inf.item() == float(not all(grad.isfinite().all() for grad in expected))


@every_executor
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_factor_of_one_keeps_every_bit(executor: Executor, dtype: torch.dtype) -> None:
    grad = patterns(dtype, executor.device)
    before = bits(grad).clone()
    executor.ops.unscale_([grad], executor.scalar(0.0), executor.scalar(1.0))
    assert torch.equal(bits(grad), before), "NaN payloads count here"


@every_executor
def test_product_is_judged_after_rounding(executor: Executor) -> None:
    """The rounded product decides whether there is an overflow. Clips are of a norm of 360,000."""
    for dtype, value, factor, max_norm, overflows in (
        (torch.float16, 65504.0, 1.00048828125, None, True),  # 65536, beyond the largest fp16
        (torch.float16, 65504.0, 1.0001, None, False),  # rounds back to 65504
        (torch.float32, torch.finfo(torch.float32).max, 1.0000001, None, True),
        (torch.bfloat16, torch.finfo(torch.bfloat16).max, 1.0000001, None, False),
        (torch.float64, 1e300, 1e30, None, True),
        (torch.float64, 1e300, 0.5, None, False),  # finite in fp64, though not in fp32
        (torch.float32, 0.0, math.inf, None, True),
        (torch.float16, 60000.0, 2.0, 1e6, True),
        (torch.float16, 60000.0, 2.0, 1.5e5, False),
    ):
        grad = torch.full((37,), value, dtype=dtype, device=executor.device)
        found_inf = clip(executor, [grad], 360000.0 if max_norm else None, max_norm, factor)
        assert found_inf == float(overflows), (dtype, value, factor)
        assert bool(grad.isfinite().all()) is not overflows, (dtype, value, factor)


def clip(
    executor: Executor,
    grads: list[torch.Tensor],
    norm: float | None,
    max_norm: float | None,
    factor: float = 1.0,
    already: float = 0.0,
) -> float:
    """Run the op with a norm and return found_inf."""
    found_inf, inv_scale = executor.scalar(already), executor.scalar(factor)
    given = None if norm is None else executor.scalar(norm)
    executor.ops.unscale_(grads, found_inf, inv_scale, norm=given, max_norm=max_norm)
    return found_inf.item()


def assert_clips_as_torch(
    executor: Executor, scaled: torch.Tensor, scale: float, norm: float, max_norm: float | None
) -> None:
    """Assert that unscaling and clipping equal torch's two passes, bit for bit."""
    inv_scale = torch.tensor(scale).reciprocal()
    expected = torch.nn.Parameter(torch.ones_like(scaled))
    expected.grad = scaled * inv_scale
    limit = math.inf if max_norm is None else max_norm
    torch.nn.utils.clip_grads_with_norm_([expected], limit, torch.tensor(norm))
    grad = scaled.to(executor.device, copy=True)
    assert clip(executor, [grad], norm, max_norm, inv_scale.item()) == 0.0
    assert_same(grad, expected.grad)


@every_executor
def test_clips_as_torch(executor: Executor) -> None:
    """Any norm and limit clip as in torch: ones times the factor are the factor."""
    norms = [0.0, 1e-30, 1e-7, 1.0, 3e38, *torch.randn(40).mul(4).exp().tolist()]
    limits = [0.0, 1e-40, 1e-3, 0.1, 1.0, 1e38, 1e300, None, *torch.randn(20).exp().tolist()]
    for norm in executor.some(norms, 12):
        for max_norm in executor.some(limits, 10):
            assert_clips_as_torch(executor, torch.ones(3), 1.0, norm, max_norm)


@every_executor
@pytest.mark.parametrize("scale", [2.0**127, 2.0**120, 1000.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_unscales_and_clips_as_torch(executor: Executor, dtype: torch.dtype, scale: float) -> None:
    """The product of the two factors may be subnormal or 0."""
    grads = torch.empty(999, dtype=dtype).uniform_(-1, 1)
    for max_norm in (1e-6, 1e-3, 1.0, 20.0):
        assert_clips_as_torch(executor, grads * scale, scale, grads.norm().item(), max_norm)


@every_executor
@pytest.mark.parametrize(("norm", "max_norm"), [*zip(NON_FINITE, (1.0, None, 0.0), strict=True)])
@pytest.mark.parametrize("count", [0, 20, 1500])
def test_norm_that_is_not_finite(
    executor: Executor, count: int, max_norm: float | None, norm: float
) -> None:
    """A norm that is not finite is an overflow, and gradients stay unchanged."""
    grads = [
        random((3000,), FLOATS[i % 4], executor.device)[i % 4 :]
        for i in range(executor.length(count))
    ]
    grads += [torch.empty(0, device=executor.device)]
    before = copies(grads)
    assert clip(executor, grads, norm, max_norm, 0.5) == 1.0
    assert_all_same(grads, before)


@every_executor
@pytest.mark.parametrize("max_norm", [None, 4.0])
def test_clipping_by_one_leaves_gradients_alone(executor: Executor, max_norm: float | None) -> None:
    """A coefficient of 1 leaves gradients unread.

    A finite norm, here a wrong one, vouches for them.
    """
    grads = [torch.full((40,), value, device=executor.device) for value in (2.0, *NON_FINITE)]
    grads[0][0] = 2.0**-149
    before = [bits(grad).clone() for grad in grads]
    assert clip(executor, grads, 2.0, max_norm) == 0.0
    for grad, was in zip(grads, before, strict=True):
        assert torch.equal(bits(grad), was)


@every_executor
def test_found_inf_does_not_stop_the_clipping(executor: Executor) -> None:
    """found_inf does not stop the clipping: other blocks may set it meanwhile."""
    grads = [torch.full((9,), 8.0, device=executor.device) for _ in range(40)]
    assert clip(executor, grads, 2.0 - 1e-6, 1.0, 0.5, already=1.0) == 1.0
    assert all(grad.tolist() == [2.0] * 9 for grad in grads)
