"""Test that list kernels give the same in every schedule of blocks, warps and copies."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import reference
from amp_ext import ops
from cases import FLOATS, LAYOUTS, assert_all_same, assert_same, copies, random, whole_and_view
from executors import CPU
from ptx_backend.backend import Ptx, Schedule

pytestmark = [pytest.mark.full, pytest.mark.ptx]

SCHEDULES = [Schedule(seed, (1, 4)[seed // 4 % 2]) for seed in range(8)]


def gradients(short: bool) -> list[Tensor]:
    """Return a list for the kernel's parameters, or one that is too long for them."""
    if not short:
        return [random((1 + 13 * i % 101,), FLOATS[i % 4], CPU) for i in range(1500)]
    layouts = [whole_and_view(name, dtype, CPU)[1] for name in LAYOUTS for dtype in FLOATS]
    return [*layouts, random((70_001,), torch.float16, CPU)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("short", [True, False], ids=["parameters", "table"])
@pytest.mark.parametrize("bad", [False, True], ids=["finite", "bad"])
def test_every_schedule_gives_the_same(
    ptx: Ptx, schedule: Schedule, short: bool, bad: bool
) -> None:
    ptx.pin(schedule)
    grads = gradients(short)
    if bad:
        grads[-1][-1] = math.nan
    inv_scale = torch.tensor(1 / 3)
    found = [torch.zeros(()) for _ in range(4)]
    ops.check_finite(grads, found[0])
    norm = ops.grad_norm(grads, found[1], inv_scale)
    expected_norm = reference.grad_norm(grads, found[2], inv_scale)
    torch.testing.assert_close(norm, expected_norm, rtol=2.0**-22, atol=0.0, equal_nan=True)
    expected = copies(grads)
    reference.unscale_(expected, torch.zeros(()), inv_scale)
    ops.unscale_(grads, found[3], inv_scale)
    assert_all_same(grads, expected)
    assert [flag.item() for flag in found] == [float(bad)] * 4


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("short", [True, False], ids=["parameters", "table"])
@pytest.mark.parametrize("bad", [False, True], ids=["finite", "bad"])
def test_every_schedule_clips_the_same(
    ptx: Ptx, schedule: Schedule, short: bool, bad: bool
) -> None:
    """Every schedule gives the same norm of each tensor, and the same norm of all.

    The last block computes them.
    """
    grads = gradients(short)
    if bad:
        grads[-1][-1] = math.inf
    inv_scale, results = torch.tensor(1 / 3), []
    for by, order in ((ops, schedule), (ops, SCHEDULES[0]), (reference, SCHEDULES[0])):
        ptx.pin(order)
        found = torch.zeros(())
        norms, clipped = torch.full((len(grads),), -1.0), copies(grads)
        norm = by.grad_norm(grads, found, inv_scale, norms=norms)
        by.unscale_(clipped, found, inv_scale, norm=results[0][0] if results else norm, max_norm=9)
        results.append([norm, norms, found, *clipped])
    assert_all_same(results[0], results[1])
    torch.testing.assert_close(results[0][:2], results[2][:2], rtol=2.0**-22, atol=0.0)
    assert_all_same(results[0][2:], results[2][2:])
    assert results[0][2].item() == float(bad)


def test_norm_is_the_same_in_every_schedule(ptx: Ptx) -> None:
    grads, norms = gradients(short=True), []
    for seed in range(9):
        ptx.pin(Schedule(seed))
        norms.append(ops.grad_norm(grads, torch.zeros(())))
        assert_same(norms[-1], norms[0])


def test_a_fault_is_the_error_of_the_op(ptx: Ptx) -> None:
    """A fault is the error of the op and leaves the next launch alone."""
    grads, found_inf = [torch.ones(9)], torch.zeros(())
    ptx.pin(Schedule(multiprocessors=0))
    with pytest.raises(RuntimeError, match=r"amp_ext::check_finite: .*: a launch of 0 blocks"):
        ops.check_finite(grads, found_inf)
    ptx.seed(0)
    ops.check_finite(grads, found_inf)
