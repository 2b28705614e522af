"""tests/simt: the CUDA kernels give the same in every schedule, and the executor finds faults.

The ops' conformance tests run on it too: see executors.py.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from amp_ext import reference
from cases import FLOATS, LAYOUTS, assert_all_same, assert_same, copies, random, whole_and_view
from executors import SIMT
from simt import build, faults, mutants
from simt.library import Schedule
from simt.sanitize import build_few_sanitized, build_sanitized, sanitized
from simt_ops import Ops

pytestmark = pytest.mark.skipif(bool(SIMT.missing), reason=SIMT.missing)

TESTS = Path(__file__).resolve().parent
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
def test_every_schedule_gives_the_same(schedule: Schedule, short: bool, bad: bool) -> None:
    ops, grads = Ops(schedule), gradients(short)
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
def test_every_schedule_clips_the_same(schedule: Schedule, short: bool, bad: bool) -> None:
    """The last block's work: norms of each tensor, and the norm of all."""
    grads = gradients(short)
    if bad:
        grads[-1][-1] = math.inf
    inv_scale, results = torch.tensor(1 / 3), []
    for ops in (Ops(schedule), Ops(SCHEDULES[0]), reference):
        found = torch.zeros(())
        norms, clipped = torch.full((len(grads),), -1.0), copies(grads)
        norm = ops.grad_norm(grads, found, inv_scale, norms=norms)
        ops.unscale_(clipped, found, inv_scale, norm=results[0][0] if results else norm, max_norm=9)
        results.append([norm, norms, found, *clipped])
    assert_all_same(results[0], results[1])
    torch.testing.assert_close(results[0][:2], results[2][:2], rtol=2.0**-22, atol=0.0)
    assert_all_same(results[0][2:], results[2][2:])
    assert results[0][2].item() == float(bad)


def test_norm_is_the_same_in_every_schedule() -> None:
    grads = gradients(short=True)
    norms = [
        Ops(Schedule(seed, 1 + seed % 8)).grad_norm(grads, torch.zeros(())) for seed in range(20)
    ]
    for norm in norms:
        assert_same(norm, norms[0])


def test_seeds_are_different_schedules() -> None:
    """What several blocks write to one place depends on their order alone."""
    inputs, last = [torch.full((9,), float(i)) for i in range(8)], []
    for seed in [*SEEDS, *SEEDS]:
        output = torch.empty(9)
        Ops(Schedule(seed)).cast_([output] * 8, inputs)
        last.append(output[0].item())
    assert len(set(last)) > 3
    assert last[: len(SEEDS)] == last[len(SEEDS) :]


# ---- faults ------------------------------------------------------------------------------------

LAUNCH_FAILURE = 719


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("kernel", "report"),
    [
        (
            "half_waits",
            r"deadlock:(?s:.*)block 1: threads 32-63 have exited\n"
            r"  block 1: threads 0-31 wait in block_sync for 32 more of the block",
        ),
        (
            "no_shuffle",
            r"deadlock:(?s:.*)block 0: threads 5, 32-63 have exited\n"
            r"  block 0: threads 0-4, 6-31 wait in shuffle_xor for 1 more of warp 0",
        ),
        (
            "lanes_differ",
            r"divergent collective: (shuffle_xor|warp_any), while threads \d+ of warp \d are "
            r"in (?!\1)(shuffle_xor|warp_any)\n  in block \d, thread \d+",
        ),
        (
            "warps_differ",
            r"divergent collective: (block_sync|block_any), while threads [-\d, ]+ of the "
            r"block are in (?!\1)(block_sync|block_any)\n  in block \d, thread \d+",
        ),
        ("shared_write", r"shared overrun: block (0|1) wrote at byte (256|260) of 256"),
        (
            "shared_size",
            r"shared overrun: 512 bytes of shared memory are used, 256 were asked for\n"
            r"  in block \d, thread \d+",
        ),
        ("vector_alignment", r"store16: misaligned: 0x\w+, 4 bytes off\n  in block \d, thread 3\n"),
    ],
)
def test_report(kernel: str, report: str, seed: int) -> None:
    error, text, _ = faults.run("plain", kernel, seed)
    assert error == LAUNCH_FAILURE
    assert re.match(report, text), text
    assert f"\n  seed {seed}, 2 resident blocks, 4 multiprocessors" in text


@pytest.mark.parametrize("variant", ["plain", "portable"])
def test_no_report(variant: str) -> None:
    reversed_twice = [*range(63, 63 - 61, -1), 0.0, 1.0, 0.0, *range(127, 63, -1)]
    assert faults.run(variant, "good") == (0, "", reversed_twice)


def test_portable_switch_finds_a_deadlock() -> None:
    assert "wait in block_sync" in faults.run("portable", "half_waits")[1]


def test_a_fault_leaves_the_next_launch_alone() -> None:
    for kernel in ("half_waits", "vector_alignment", "lanes_differ"):
        faults.run("plain", kernel)
        assert faults.run("plain", "good")[:2] == (0, "")


def test_shared_memory_starts_as_nan() -> None:
    assert all(map(math.isnan, faults.run("plain", "shared_poison")[2][:64]))


def test_a_missing_barrier_shows_in_some_schedule() -> None:
    assert any(
        math.isnan(value) for seed in SEEDS for value in faults.run("plain", "no_barrier", seed)[2]
    )


@pytest.mark.parametrize(
    ("variant", "kernel", "report"),
    [
        ("asan", "good", ""),
        (
            "asan",
            "global_write",
            r"heap-buffer-overflow(?s:.*)writes_behind_global .*faults\.cu:\d+"
            r"(?s:.*)the above happened in block \d, thread 9",
        ),
        (
            "asan",
            "shared_write",
            r"use-after-poison(?s:.*)writes_behind_shared .*faults\.cu:\d+"
            r"(?s:.*)the above happened in block \d, thread 7",
        ),
        (
            "asan",
            "scalar_alignment",
            r"faults\.cu:\d+:\d+: runtime error: store to misaligned address",
        ),
        ("asan", "copy_global", r"cp_async: global overrun: 4 bytes at 0x\w+ are not all memory"),
        ("tsan", "good", ""),
        ("tsan", "copied", ""),
        ("tsan", "copy_unwaited", r"data race(?s:.*)fetch<false, true>"),
        ("tsan", "copy_unsynchronised", r"data race(?s:.*)fetch<true, false>"),
        ("tsan", "fenced", ""),
        ("tsan", "unfenced", r"data race(?s:.*)hand_over<false>"),
        ("tsan", "no_barrier", r"data race(?s:.*)reverse<false>"),
        ("tsan", "blocks_race", r"data race(?s:.*)all_blocks_write"),
    ],
)
def test_sanitizer(variant: str, kernel: str, report: str) -> None:
    script = str(TESTS / "simt" / "faults.py")
    build_sanitized(variant, name="faults", sources=faults.SOURCES)
    done = sanitized(variant, script, variant, kernel)
    text = done.stdout + done.stderr
    if report:
        assert done.returncode != 0, text
        assert re.search(report, text), text
    else:
        assert (done.returncode, done.stderr) == (0, ""), text


ASAN = (
    "every_layout or mixed or any_found_inf or (edge and float16-1) or at-2-from-5 or clips_any "
    "or (norm_of_each and 2000) or two_ops"
)
TSAN = (
    "small_exact or found_inf or (random_bit_patterns and float32-1.5) or from-3 or is_its_own "
    "or (clips_any and -3-) or (two_ops and -3-)"
)


@pytest.mark.parametrize(("variant", "tests"), [("asan", ASAN), ("tsan", TSAN)])
def test_conformance_under_a_sanitizer(variant: str, tests: str) -> None:
    library = build_few_sanitized(variant)
    files = (
        *("test_unscale.py", "test_check_finite.py", "test_grad_norm.py", "test_update_scale.py"),
        *("test_cast.py", "test_cast_memory.py"),
    )
    pytest_ = ("-m", "pytest", "-q", "-s", "-x", "-p", "no:cacheprovider", "-k")
    expression = f"simt and ({tests})"
    paths = (str(TESTS / name) for name in files)
    done = sanitized(variant, *pytest_, expression, *paths, library=library)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


# ---- mutants of the kernels --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suite", "mutant"),
    [pytest.param(s, mutant, id=mutant.name) for s in mutants.SUITES for mutant in s.mutants],
)
def test_mutant_is_an_edit_of_the_kernels(suite: mutants.Suite, mutant: mutants.Mutant) -> None:
    assert mutants.applies(suite, mutant)


# ---- the executor itself -----------------------------------------------------------------------


def test_can_be_read_in_an_hour() -> None:
    """2,000 lines of code, not counting comments: what its README promises."""
    files = [path for kind in ("*.cpp", "*.h", "*.cuh") for path in build.HERE.glob(kind)]
    lines = [line.strip() for path in files for line in path.read_text().splitlines()]
    assert sum(bool(line) and not line.startswith("//") for line in lines) <= 2000
    assert max(len(path.read_text().splitlines()) for path in files) <= 400
