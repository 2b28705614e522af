"""tests/simt: what kernels do wrong with asynchronous copies, barriers and matrices is reported."""

from __future__ import annotations

import math
import re

import pytest
import torch

from executors import SIMT
from simt import faults
from test_simt_pieces import library, run
from test_simt_sm90 import Map, tensor_map

pytestmark = pytest.mark.skipif(bool(SIMT.missing), reason=SIMT.missing)

LAUNCH_FAILURE = 719
EAGER, LAZY, RANDOM = range(3)
SEEDS = (EAGER, LAZY, RANDOM, 29)
BARRIER = r"the mbarrier at shared\+17408"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("kernel", "report"),
    [
        ("copy_at_exit", r"exit with cp_async in flight, at shared\+0: no wait follows"),
        ("copy_range", r"cp_async: 0x\w+ is not in the block's shared memory"),
        ("row_alignment", r"ldmatrix: misaligned: shared\+\d+, which is no multiple of 16"),
        ("no_release", r"deadlock:(?s:.*)wait in wait_acquire for 7, the counter at 0x\w+ is 0"),
        (
            "store_unfenced",
            r"missing proxy fence: tma_store reads shared\+80, which thread 2[0-3] wrote without a "
            r"fence_proxy_async behind it\n  in block \d, thread 0",
        ),
        ("store_at_exit", r"exit with tma_store in flight, at shared\+0: no wait follows"),
        (
            "mbarrier_uninitialised",
            r"mbarrier_arrive: no mbarrier has been initialised at shared\+17408 of block \d",
        ),
        ("mbarrier_twice", r"mbarrier_init: there is a live mbarrier at shared\+17408"),
        (
            "mbarrier_unfenced",
            r"tma_load: thread 0, which initialised the mbarrier at shared\+17408 of block \d, "
            r"has not executed fence_mbarrier_init\n  in block \d, thread 32",
        ),
        (
            "mbarrier_over_arrival",
            rf"mbarrier_arrive: over-arrival at {BARRIER}: phase 0 expects 1 arrivals, and all "
            r"have come",
        ),
        ("mbarrier_few_bytes", r"\w+: mbarrier at shared\+17408, phase 0: 16 bytes more than"),
        (
            "mbarrier_many_bytes",
            rf"deadlock:\n  block 0: threads 0-127 wait at {BARRIER}, phase 0, for 0 arrivals and "
            r"16 bytes\n  block 1: threads 0-127 wait",
        ),
        ("mbarrier_overwritten", rf"mbarrier_wait: {BARRIER} of block \d has been overwritten"),
        ("exited_block", r"mbarrier_arrive_cluster: block 1 of the cluster has exited"),
        ("rank_outside", r"mbarrier_arrive_cluster: block 2 of a cluster of 2"),
        ("multicast_outside", r"tma_load: block 2 of a cluster of 2"),
        ("cluster_twice", r"cluster_arrive: twice without a cluster_wait between"),
        ("cluster_alone", r"cluster_wait: without a cluster_arrive before"),
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


def encode(changes: dict[str, object]) -> Map:
    described = tensor_map(torch.zeros(2, 8, 64), (32, 8, 1))
    for name, value in changes.items():
        field = getattr(described, name)
        if isinstance(value, tuple):
            field[:] = value
        else:
            setattr(described, name, (field or 0) + value)
    return described


@pytest.mark.parametrize(
    ("changes", "report"),
    [
        ({"data": 8}, r"the tensor's address 0x\w+ is not aligned to 16 bytes"),
        ({"size": (0, 8, 2)}, "dimension 0 has 0 elements, not 1 to 2^32"),
        ({"strides": (264, 4096)}, "dimension 1 has a stride of 264 bytes, not a multiple of 16"),
        ({"strides": (256, 4100)}, "dimension 2 has a stride of 4100 bytes, not a multiple of 16"),
        ({"box": (32, 257, 1)}, "the box has 257 elements in dimension 1, not 1 to 256"),
        ({"box": (31, 8, 1)}, "the box's rows have 124 bytes, not a multiple of 16"),
        ({"box": (36, 8, 1), "swizzle": 3}, "the box's rows have 144 bytes, the swizzle spans 128"),
        ({"box": (32, 8, 1), "swizzle": 2}, "the box's rows have 128 bytes, the swizzle spans 64"),
        ({"type": 100}, "data type 107, which the executor does not have"),
    ],
    ids=str,
)
def test_encoder_refuses(changes: dict[str, object], report: str) -> None:
    with pytest.raises(AssertionError):
        run(0, "encode", encode(changes))
    text = library().report()
    assert text.startswith("cuTensorMapEncodeTiled: ")
    assert report in text or re.search(report, text), text


def test_encoder_accepts() -> None:
    run(0, "encode", encode({}))
    run(0, "encode", encode({"swizzle": 3}))
