"""tests/simt/kernels: the demonstration kernels, executed on the CPU and run by a GPU.

Operands are small integers, and every sum of their products is less than 2^24: FP32 holds it, and
each partial sum, exactly. So all results are compared bit by bit, whatever the order of summation.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from simt import demos
from simt.demos import CUDA, INVALID_CONFIGURATION, INVALID_VALUE, SIMT, Executor, LaunchError
from simt.library import Schedule
from simt.sanitize import build_sanitized, sanitized

LARGEST = 4
"""Of an operand's element. Sums are exact for k up to 2^20."""
GUARD = 64  # elements
HALVES = (torch.float16, torch.bfloat16)
SCHEDULES = [Schedule(seed, 1 + seed % 3) for seed in range(6)]
ONE_SCHEDULE = SCHEDULES[:1]


def on(kernel: str) -> pytest.MarkDecorator:
    """Run a test of a kernel once per executor."""
    return pytest.mark.parametrize(
        "executor",
        [
            pytest.param(
                executor,
                id=executor.name,
                marks=pytest.mark.skipif(bool(reason), reason=reason),
            )
            for executor in (SIMT, CUDA)
            for reason in [executor.missing(kernel)]
        ],
    )


def integers(shape: tuple[int, ...], dtype: torch.dtype, executor: Executor) -> Tensor:
    """Return random integers between -LARGEST and LARGEST."""
    return torch.randint(-LARGEST, LARGEST + 1, shape).to(executor.device, dtype)


def check(executor: Executor, expected: Tensor, launch: Callable[[Tensor, Schedule], None]) -> None:
    """Assert that launch(out, schedule) writes what is expected to `out`, and nothing behind it."""
    size = expected.numel()
    # A GPU has a schedule of its own.
    for schedule in SCHEDULES if executor is SIMT else ONE_SCHEDULE:
        memory = torch.full((size + GUARD,), torch.nan, dtype=expected.dtype).to(executor.device)
        launch(memory[:size].view(expected.shape), schedule)
        result = memory.cpu()
        torch.testing.assert_close(result[:size].view(expected.shape), expected, rtol=0, atol=0)
        assert result[size:].isnan().all()


def refused(executor: Executor, kernel: str, *arguments: Tensor | int) -> None:
    """Assert that a launcher does not support these arguments."""
    with pytest.raises(LaunchError) as raised:
        executor.call(kernel, ONE_SCHEDULE[0], *arguments)
    assert raised.value.error == INVALID_VALUE


def name(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def product(a: Tensor, b: Tensor) -> Tensor:
    return a.cpu().float() @ b.cpu().float()


# ---- block_sum ---------------------------------------------------------------------------------

COLUMNS = (0, 1, 2, 3, 4, 5, 8, 31, 255, 257, 1023, 1024, 1025, 1029, 5003)


@on("block_sum")
@pytest.mark.parametrize("columns", COLUMNS)
def test_block_sum(executor: Executor, columns: int) -> None:
    """With an odd number of columns the rows begin at every alignment."""
    x = integers((5, columns), torch.float32, executor)
    check(executor, x.cpu().sum(1), lambda out, s: demos.block_sum(executor, x, out, s))


@on("block_sum")
@pytest.mark.parametrize("offset", range(4))
def test_block_sum_of_a_view(executor: Executor, offset: int) -> None:
    x = integers((offset + 1003,), torch.float32, executor)[offset:].view(1, -1)
    check(executor, x.cpu().sum(1), lambda out, s: demos.block_sum(executor, x, out, s))


@on("block_sum")
def test_block_sum_is_the_same_in_every_schedule(executor: Executor) -> None:
    x = torch.randn(4, 3001).to(executor.device)
    expected = torch.empty(4, device=executor.device)
    demos.block_sum(executor, x, expected, SCHEDULES[0])
    torch.testing.assert_close(expected, x.sum(1), rtol=2.0**-16, atol=2.0**-16)
    check(executor, expected.cpu(), lambda out, s: demos.block_sum(executor, x, out, s))


@on("block_sum")
def test_block_sum_refuses(executor: Executor) -> None:
    x = torch.ones(1, device=executor.device)
    for rows, columns in ((0, 1), (-1, 1), (1, -1)):
        refused(executor, "block_sum", x, x.clone(), rows, columns)


# ---- gemm_sm80: tiles of 128x128, steps of 32, three stages ------------------------------------

SHAPES_SM80 = (
    (1, 1, 8),
    (1, 129, 40),
    (127, 128, 32),
    (128, 127, 24),
    (128, 128, 64),
    (129, 1, 96),
    (129, 131, 248),  # the ring goes round twice and a half
    (257, 130, 200),
)


@on("gemm_sm80")
@pytest.mark.parametrize("shape", SHAPES_SM80, ids=name)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gemm_sm80(executor: Executor, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = integers((m, k), dtype, executor), integers((n, k), dtype, executor)
    check(executor, product(a, b.T), lambda out, s: demos.gemm_sm80(executor, a, b, out, s))


@on("gemm_sm80")
def test_gemm_sm80_refuses(executor: Executor) -> None:
    memory = torch.ones(64, dtype=torch.float16, device=executor.device)
    good = {"a": memory, "b": memory, "c": memory.float(), "m": 1, "n": 1, "k": 8, "bf16": 0}
    executor.call("gemm_sm80", ONE_SCHEDULE[0], *good.values())
    for bad in (
        *({size: n} for size in "mnk" for n in (0, -8)),
        {"k": 12},
        *({operand: memory[4:]} for operand in "ab"),
    ):
        refused(executor, "gemm_sm80", *(good | bad).values())
    with pytest.raises(LaunchError) as raised:  # 65,536 blocks along y
        executor.call("gemm_sm80", ONE_SCHEDULE[0], *(good | {"n": 2**23}).values())
    assert raised.value.error == INVALID_CONFIGURATION


# ---- gemm_sm90: tiles of 128x128, steps of 64, four stages -------------------------------------

MAJORS = {"kk": (False, False), "kn": (False, True), "mk": (True, False), "mn": (True, True)}
"""Which index of a and of b is contiguous, and whether it is m or n."""
SHAPES_SM90 = (  # batch, m, n, k
    (1, 8, 8, 8),
    (1, 120, 120, 56),
    (1, 128, 128, 64),
    (1, 136, 136, 72),
    (2, 136, 264, 200),
    (1, 264, 136, 584),  # the ring goes round twice in each of six tiles
)


def operands(
    executor: Executor, dtype: torch.dtype, majors: str, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    batch, m, n, k = shape
    a_is_mn_major, b_is_mn_major = MAJORS[majors]
    a = integers((batch, k, m) if a_is_mn_major else (batch, m, k), dtype, executor)
    b = integers((batch, k, n) if b_is_mn_major else (batch, n, k), dtype, executor)
    return a.mT if a_is_mn_major else a, b if b_is_mn_major else b.mT


def check_gemm_sm90(
    executor: Executor,
    dtype: torch.dtype,
    majors: str,
    shape: tuple[int, ...],
    cluster: int,
    blocks: int,
) -> None:
    a, b = operands(executor, dtype, majors, shape)
    check(
        executor,
        product(a, b).to(dtype),
        lambda out, s: demos.gemm_sm90(executor, a, b, out, s, cluster, blocks),
    )


@on("gemm_sm90")
@pytest.mark.parametrize("shape", SHAPES_SM90, ids=name)
@pytest.mark.parametrize("cluster", [1, 2], ids="cluster{}".format)
@pytest.mark.parametrize("majors", MAJORS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gemm_sm90(
    executor: Executor, dtype: torch.dtype, majors: str, cluster: int, shape: tuple[int, ...]
) -> None:
    check_gemm_sm90(executor, dtype, majors, shape, cluster, blocks=2)


@on("gemm_sm90")
@pytest.mark.parametrize("cluster", [1, 2], ids="cluster{}".format)
@pytest.mark.parametrize(
    ("majors", "shape"),
    [
        ("kk", (1, 1, 8, 64)),
        ("kk", (2, 127, 136, 64)),
        ("kn", (2, 129, 128, 72)),
        ("mn", (1, 128, 128, 1)),
        ("mn", (1, 136, 128, 63)),
        ("mn", (2, 8, 136, 65)),
    ],
)
def test_gemm_sm90_of_odd_sizes(
    executor: Executor, majors: str, shape: tuple[int, ...], cluster: int
) -> None:
    """Only the contiguous sizes are multiples of 8."""
    check_gemm_sm90(executor, torch.float16, majors, shape, cluster, blocks=2)


@on("gemm_sm90")
@pytest.mark.parametrize("blocks", [2, 4, 6, 14])
@pytest.mark.parametrize("cluster", [1, 2], ids="cluster{}".format)
def test_gemm_sm90_with_any_grid(executor: Executor, cluster: int, blocks: int) -> None:
    """From one cluster for all of the ten tiles to more blocks than there are tiles."""
    check_gemm_sm90(executor, torch.float16, "kk", (1, 640, 136, 72), cluster, blocks)


@on("gemm_sm90")
def test_gemm_sm90_refuses(executor: Executor) -> None:
    memory = torch.ones(2, 64, dtype=torch.float16, device=executor.device)
    good = {
        **{"a": memory[0], "b": memory[0], "c": memory[1]},
        **{"m": 8, "n": 8, "k": 8, "batch": 1},
        **{"a_is_mn_major": 0, "b_is_mn_major": 0, "bf16": 0, "cluster": 1, "blocks": 2},
    }
    executor.call("gemm_sm90", ONE_SCHEDULE[0], *good.values())
    for bad in (
        *({size: n} for size in ("m", "n", "k", "batch", "cluster", "blocks") for n in (0, -8)),
        {"n": 4},
        {"k": 4},
        {"m": 4, "a_is_mn_major": 1},
        {"cluster": 3},
        {"cluster": 2, "blocks": 3},
        *({operand: memory[0, 4:]} for operand in "abc"),
    ):
        refused(executor, "gemm_sm90", *(good | bad).values())


# ---- what the executor promises ----------------------------------------------------------------

needs_executor = pytest.mark.skipif(bool(SIMT.missing("")), reason=SIMT.missing(""))


@needs_executor
@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere stacks change slowly")
def test_a_product_of_256_takes_less_than_50_ms() -> None:
    """So that the tests of a kernel can afford hundreds of launches. It takes 10 ms.

    The least of some times of this process alone is not disturbed by other processes.
    """
    a, b, c = (integers((1, 256, 256), torch.float16, SIMT) for _ in range(3))
    seconds = []
    for schedule in SCHEDULES:
        start = time.process_time()
        demos.gemm_sm90(SIMT, a, b, c, schedule)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.050


@needs_executor
@pytest.mark.parametrize(
    ("variant", "shapes"),
    [
        ("asan", "127x128x32 or 129x131x248 or 1x136x136x72"),
        ("tsan", "129x131x248"),
    ],
    ids=["asan", "tsan"],
)
def test_under_a_sanitizer(variant: str, shapes: str) -> None:
    build_sanitized(variant, name="demos", sources=demos.sources("90a"))
    expression = f"not cuda and (block_sum or (torch.float16 and ({shapes})))"
    pytest_ = ("-m", "pytest", "-q", "-s", "-x", "-p", "no:cacheprovider", "-k", expression)
    done = sanitized(variant, *pytest_, __file__)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
