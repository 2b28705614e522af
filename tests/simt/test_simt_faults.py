"""tests/simt: what kernels do wrong is reported, by a kernel for each fault."""

from __future__ import annotations

import itertools
import math
import re

import pytest

from simt import build
from simt.faults import run as faults
from simt.sanitize import build_sanitized, sanitized

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(build.missing()), reason=build.missing()),
]

LAUNCH_FAILURE, INVALID_VALUE = 719, 1
EAGER, LAZY, RANDOM = range(3)
SEEDS = (EAGER, LAZY, RANDOM, 29)
BARRIER = r"the mbarrier at shared\+25600"


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
        ("vector_alignment", r"store: misaligned: 0x\w+, 4 bytes off\n  in block \d, thread 3\n"),
        ("early_exit", r"exit without wait_for_previous_grid\n  in block \d, thread \d+"),
        ("early_load", r"load before wait_for_previous_grid\n  in block \d, thread \d+"),
        ("copy_at_exit", r"exit with cp_async16 in flight, at shared\+0: no wait follows"),
        ("copy_range", r"cp_async16: 0x\w+ is not in the block's shared memory"),
        ("row_alignment", r"ldmatrix: misaligned: shared\+\d+, which is no multiple of 16"),
        (
            "store_unfenced",
            r"missing proxy fence: tma_store reads shared\+80, which thread 2[0-3] wrote without a "
            r"fence_proxy_async behind it\n  in block \d, thread 0",
        ),
        ("store_at_exit", r"exit with tma_store in flight, at shared\+0: no wait follows"),
        (
            "mbarrier_uninitialised",
            r"mbarrier_arrive: no mbarrier has been initialised at shared\+25600 of block \d",
        ),
        ("mbarrier_twice", r"mbarrier_init: there is a live mbarrier at shared\+25600"),
        (
            "mbarrier_unfenced",
            r"tma_load: thread 0, which initialised the mbarrier at shared\+25600 of block \d, "
            r"has not executed fence_mbarrier_init\n  in block \d, thread 32",
        ),
        (
            "mbarrier_over_arrival",
            rf"mbarrier_arrive: over-arrival at {BARRIER}: phase 0 expects 1 arrivals, and all "
            r"have come",
        ),
        ("mbarrier_few_bytes", r"\w+: mbarrier at shared\+25600, phase 0: 16 bytes more than"),
        (
            "mbarrier_many_bytes",
            rf"deadlock:\n  block 0: threads 0-127 wait at {BARRIER}, phase 0, for 0 arrivals and "
            r"16 bytes\n  block 1: threads 0-127 wait",
        ),
        ("mbarrier_overwritten", rf"mbarrier_wait: {BARRIER} of block \d has been overwritten"),
        ("exited_block", r"mbarrier_arrive_cluster: block 1 of the cluster has exited"),
        ("rank_outside", r"mbarrier_arrive_cluster: block 2 of a cluster of 2"),
        ("multicast_outside", r"tma_load: block 2 of a cluster of 2"),
        (
            "barrier_counts",
            r"divergent collective: barrier of (64|96), while threads [-\d, ]+ of barrier 1 are in "
            r"barrier of (?!\1)(64|96)",
        ),
        (
            "register_pool",
            r"deadlock:\n  block 0: threads 0-511 wait, as setmaxnreg.inc 232 needs 13312 "
            r"registers, the pool has 0",
        ),
        ("register_direction", r"setmaxnreg.dec 240: the threads have 128 registers"),
        (
            "wgmma_unfenced",
            r"missing proxy fence: wgmma b reads shared\+9344, which thread 70 wrote without a "
            r"fence_proxy_async behind it",
        ),
        ("wgmma_no_fence", r"missing wgmma.fence"),
        (
            "wgmma_descriptors",
            r"divergent collective: wgmma 0x(\w+) (?s:.*), while threads [-\d, ]+ of warpgroup 0 "
            r"are in wgmma 0x(?!\1)",
        ),
        ("wgmma_partial", r"wgmma_fence: the last 64 threads of the block are no warpgroup"),
        ("wgmma_range", r"wgmma a: shared overrun: reads shared\+\d+ of \d+"),
        ("wgmma_at_exit", r"exit with wgmmas in flight: no wait follows"),
        ("wgmma_early_write", r"wgmma: an accumulator was changed while it was in flight"),
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
    seen = [faults.run("plain", "no_barrier", seed)[2] for seed in range(8)]
    assert any(map(math.isnan, itertools.chain(*seen)))


@pytest.mark.parametrize(
    ("variant", "kernel", "report"),
    [
        ("asan", "good", ""),
        (
            "asan",
            "global_write",
            r"heap-buffer-overflow(?s:.*)writes_behind_global .*sm80\.cu:\d+"
            r"(?s:.*)the above happened in block \d, thread 9",
        ),
        (
            "asan",
            "shared_write",
            r"use-after-poison(?s:.*)writes_behind_shared .*sm80\.cu:\d+"
            r"(?s:.*)the above happened in block \d, thread 7",
        ),
        (
            "asan",
            "scalar_alignment",
            r"sm80\.cu:\d+:\d+: runtime error: store to misaligned address",
        ),
        ("asan", "copy_global", r"cp_async16: global overrun: 16 bytes at 0x\w+ are not all"),
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
    script = str(build.HERE / "faults" / "run.py")
    build_sanitized(variant, name="faults", sources=faults.SOURCES)
    done = sanitized(variant, script, variant, kernel)
    text = done.stdout + done.stderr
    if report:
        assert done.returncode != 0, text
        assert re.search(report, text), text
    else:
        assert (done.returncode, done.stderr) == (0, ""), text


def test_a_load_that_nobody_waits_for() -> None:
    error, text, _ = faults.run("plain", "load_at_exit", LAZY)
    assert error == LAUNCH_FAILURE
    assert re.match(r"block \d ended with tma_load to shared\+0 in flight", text), text


def test_a_copy_that_is_read_too_early_shows() -> None:
    assert faults.run("plain", "copied", LAZY)[0] == 0
    seen = faults.run("plain", "copy_unwaited", LAZY)[2]
    assert any(map(math.isnan, seen))


def test_a_store_that_is_overwritten_shows() -> None:
    seen = {seed: faults.run("plain", "store_overwritten", seed)[2] for seed in SEEDS}
    assert set(seen[EAGER]) == {1.0}
    assert set(seen[LAZY]) == {2.0}


@pytest.mark.parametrize("seed", SEEDS)
def test_accumulators_in_flight_are_nan(seed: int) -> None:
    error, text, seen = faults.run("plain", "wgmma_early_read", seed)
    assert (error, text) == (0, "")
    assert all(map(math.isnan, seen))


# ---- tensor maps -------------------------------------------------------------------------------

FLOAT32 = 7  # CUtensorMapDataType


def encode(address: int = 0, type: int = FLOAT32, swizzle: int = 0, **changes: object):
    """Make a map of 2 x 8 x 64 numbers."""
    described = {"size": (64, 8, 2), "strides": (256, 2048), "box": (32, 8, 1)} | changes
    tensor = faults.Tensor(*(described[name] for name, _ in faults.Tensor._fields_))
    return faults.encode(4096 + address, type, swizzle, tensor)


@pytest.mark.parametrize(
    ("changes", "report"),
    [
        ({"address": 8}, "the tensor's address 0x1008 is not aligned to 16 bytes"),
        ({"size": (0, 8, 2)}, "dimension 0 has 0 elements, not 1 to 2^32"),
        ({"strides": (264, 4096)}, "dimension 1 has a stride of 264 bytes, not a multiple of 16"),
        ({"strides": (256, 4100)}, "dimension 2 has a stride of 4100 bytes, not a multiple of 16"),
        ({"box": (32, 257, 1)}, "the box has 257 elements in dimension 1, not 1 to 256"),
        ({"box": (31, 8, 1)}, "the box's rows have 124 bytes, not a multiple of 16"),
        ({"box": (36, 8, 1), "swizzle": 3}, "the box's rows have 144 bytes, the swizzle spans 128"),
        ({"box": (32, 8, 1), "swizzle": 2}, "the box's rows have 128 bytes, the swizzle spans 64"),
        ({"type": 100}, "data type 100, which the executor does not have"),
    ],
    ids=str,
)
def test_encoder_refuses(changes: dict, report: str) -> None:
    error, text = encode(**changes)
    assert error == INVALID_VALUE
    assert text.startswith(f"cuTensorMapEncodeTiled: {report}"), text


def test_encoder_accepts() -> None:
    assert encode()[0] == encode(swizzle=3)[0] == 0
