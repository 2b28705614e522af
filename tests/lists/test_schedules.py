"""Test that list kernels give the same in every schedule of blocks, warps and copies."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import reference
from amp_ext import ops
from cases import FLOATS, LAYOUTS, assert_all_same, copies, random, whole_and_view
from executors import CPU
from ptx_backend.backend import Ptx, Schedule

pytestmark = [pytest.mark.full, pytest.mark.ptx]

SCHEDULES = [Schedule(seed, (1, 4)[seed // 4 % 2]) for seed in range(8)]
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
in_either_table = pytest.mark.parametrize("short", [True, False], ids=["parameters", "table"])


def gradients(short: bool) -> list[Tensor]:
    """Return a list for the kernel's parameters, or one that is too long for them."""
    if not short:
        return [random((1 + 13 * i % 101,), FLOATS[i % 4], CPU) for i in range(1345)]
    layouts = [whole_and_view(name, dtype, CPU)[1] for name in LAYOUTS for dtype in FLOATS]
    return [*layouts, random((70_001,), torch.float16, CPU)]


@every_schedule
@in_either_table
@pytest.mark.parametrize("bad", [0.0, math.nan], ids=["finite", "nan"])
def test_every_schedule_gives_the_same(
    ptx: Ptx, schedule: Schedule, short: bool, bad: float
) -> None:
    """Every schedule gives the same flag, norms, and unscaled, clipped and cast gradients."""
    grads = gradients(short)
    if bad:
        grads[-1][-1] = bad
    inv_scale, results = torch.tensor(1 / 3), []
    for by, order in ((ops, schedule), (ops, SCHEDULES[0]), (reference, SCHEDULES[0])):
        ptx.pin(order)
        found = [torch.zeros(()) for _ in range(4)]
        by.check_finite(grads, found[0])
        norms, unscaled, clipped = torch.full((len(grads),), -1.0), copies(grads), copies(grads)
        norm = by.grad_norm(grads, found[1], inv_scale, norms=norms)
        by.unscale_(unscaled, found[2], inv_scale)
        by.unscale_(
            clipped, found[3], inv_scale, norm=results[0][0] if results else norm, max_norm=9
        )
        outputs = [torch.empty_like(t, dtype=FLOATS[i // 4 % 4]) for i, t in enumerate(grads)]
        by.cast_(outputs, grads)
        results.append([norm, norms, *found, *unscaled, *clipped, *outputs])
    assert_all_same(results[0], results[1])
    close = {"rtol": 2.0**-22, "atol": 0.0, "equal_nan": True}
    torch.testing.assert_close(results[0][:2], results[2][:2], **close)
    assert_all_same(results[0][2:], results[2][2:])
    assert [flag.item() for flag in results[0][2:6]] == [float(bad != 0)] * 4


def test_a_fault_is_the_error_of_the_op(ptx: Ptx) -> None:
    """A fault is the error of the op and leaves the next launch alone."""
    grads, found_inf = [torch.ones(9)], torch.zeros(())
    ptx.pin(Schedule(multiprocessors=0))
    with pytest.raises(RuntimeError, match=r"amp_ext::check_finite: .*: a launch of no blocks"):
        ops.check_finite(grads, found_inf)
    ptx.seed(0)
    ops.check_finite(grads, found_inf)
