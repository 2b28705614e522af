"""tests/simt: the CUDA kernels give the same in every schedule, and under sanitizers.

The ops' conformance tests run on it too: see executors.py.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import reference
from amp_ext import ops
from cases import FLOATS, LAYOUTS, assert_all_same, assert_same, copies, random, whole_and_view
from simt import build
from simt.backend import Simt
from simt.library import Schedule
from simt.mutants import run as mutants
from simt.sanitize import build_few_sanitized, sanitized

pytestmark = [pytest.mark.full, pytest.mark.simt]

TESTS = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
SEEDS = range(8)
SCHEDULES = [Schedule(seed, (1, 2, 3, 8)[seed % 4], (1, 4)[seed // 4 % 2]) for seed in SEEDS]


def gradients(short: bool) -> list[Tensor]:
    """Return a list for the kernel's parameters, or one that is too long for them."""
    if not short:
        return [random((1 + 13 * i % 101,), FLOATS[i % 4], CPU) for i in range(1500)]
    layouts = [whole_and_view(name, dtype, CPU)[1] for name in LAYOUTS for dtype in FLOATS]
    return [*layouts, random((70_001,), torch.float16, CPU)]


# ---- schedules ---------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("short", [True, False], ids=["parameters", "table"])
@pytest.mark.parametrize("bad", [False, True], ids=["finite", "bad"])
def test_every_schedule_gives_the_same(
    simt: Simt, schedule: Schedule, short: bool, bad: bool
) -> None:
    simt.pin(schedule)
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
    simt: Simt, schedule: Schedule, short: bool, bad: bool
) -> None:
    """The last block's work: norms of each tensor, and the norm of all."""
    grads = gradients(short)
    if bad:
        grads[-1][-1] = math.inf
    inv_scale, results = torch.tensor(1 / 3), []
    for by, order in ((ops, schedule), (ops, SCHEDULES[0]), (reference, SCHEDULES[0])):
        simt.pin(order)
        found = torch.zeros(())
        norms, clipped = torch.full((len(grads),), -1.0), copies(grads)
        norm = by.grad_norm(grads, found, inv_scale, norms=norms)
        by.unscale_(clipped, found, inv_scale, norm=results[0][0] if results else norm, max_norm=9)
        results.append([norm, norms, found, *clipped])
    assert_all_same(results[0], results[1])
    torch.testing.assert_close(results[0][:2], results[2][:2], rtol=2.0**-22, atol=0.0)
    assert_all_same(results[0][2:], results[2][2:])
    assert results[0][2].item() == float(bad)


def test_norm_is_the_same_in_every_schedule(simt: Simt) -> None:
    grads, norms = gradients(short=True), []
    for seed in range(20):
        simt.pin(Schedule(seed, 1 + seed % 8))
        norms.append(ops.grad_norm(grads, torch.zeros(())))
        assert_same(norms[-1], norms[0])


def test_seeds_are_different_schedules(simt: Simt) -> None:
    """How often threads are changed depends on their order alone."""
    grads, switches = gradients(short=True), []
    for seed in [*SEEDS, *SEEDS]:
        simt.pin(Schedule(seed))
        switches.append(simt.cost(ops.grad_norm, grads, torch.zeros(())).switches)
    assert len(set(switches)) > 3
    assert switches[: len(SEEDS)] == switches[len(SEEDS) :]


def test_a_fault_is_the_error_of_the_op(simt: Simt) -> None:
    """And leaves the next launch alone."""
    grads, found_inf = [torch.ones(9)], torch.zeros(())
    simt.pin(Schedule(multiprocessors=0))
    with pytest.raises(RuntimeError, match=r"amp_ext::check_finite: .*: a launch of 0x1x1 blocks"):
        ops.check_finite(grads, found_inf)
    simt.seed(0)
    ops.check_finite(grads, found_inf)


# ---- the ops under a sanitizer ------------------------------------------------------------------

ASAN = (
    "every_layout or mixed or any_found_inf or (edge and float16-1) or at-2-from-5 or clips_any "
    "or (norm_of_each and 2000) or at_its_end or test_sizes or test_alignments "
    "or test_dtypes or (long and 403)"
)
TSAN = (
    "small_exact or found_inf or (random_bit_patterns and float32-1.5) or from-3 or is_its_own "
    "or (clips_any and -3-) or (long_lists and 403) or norm_that_is_not_finite"
)


@pytest.mark.parametrize(("variant", "tests"), [("asan", ASAN), ("tsan", TSAN)])
def test_conformance_under_a_sanitizer(variant: str, tests: str) -> None:
    library = build_few_sanitized(variant)
    files = (
        *("unscale", "check_finite", "grad_norm", "update_scale"),
        *("cast", "cast_memory", "updates"),
    )
    pytest_ = ("-m", "pytest", "-q", "-s", "-x", "-p", "no:cacheprovider", "-k")
    expression = f"simt and ({tests})"
    paths = (str(path) for name in files for path in TESTS.glob(f"*/test_{name}.py"))
    done = sanitized(variant, *pytest_, expression, *paths, library=library)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


# ---- mutants of the kernels --------------------------------------------------------------------


def test_every_mutant_is_an_edit_of_the_kernels() -> None:
    assert [mutant.name for mutant in mutants.MUTANTS if not mutants.applies(mutant)] == []


# ---- the executor itself -----------------------------------------------------------------------


def test_can_be_read_in_an_hour() -> None:
    """2,000 lines of code, not counting comments: what its README promises."""
    files = [path for path in build.ENGINE.rglob("*.*") if path.suffix in (".cpp", ".h", ".cuh")]
    lines = [line.strip() for path in files for line in path.read_text().splitlines()]
    assert sum(bool(line) and not line.startswith("//") for line in lines) <= 2000
    assert max(len(path.read_text().splitlines()) for path in files) <= 400
