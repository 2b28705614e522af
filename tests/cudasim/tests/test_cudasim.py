"""Test the executor of PTX: its results, and the faults and races it finds."""

from __future__ import annotations

import math
import random
import re
import struct
from ctypes import c_float, c_int, c_ubyte, c_uint, c_uint16
from functools import cache
from pathlib import Path

import pytest

from cudasim import build, executor
from cudasim.executor import Array, Fault, Module

HERE = Path(__file__).resolve().parent
ARCHITECTURES = ("75", "90a")
SEEDS = range(9)  # all orders, early, late and random copies

pytestmark = pytest.mark.skipif(bool(build.missing()), reason=build.missing())


@cache
def module(name: str, architecture: str = "90a") -> Module:
    files = ("ordinary", "faults", "races", "../example/transpose")
    units = [((HERE / f"{file}.cu").resolve(), ["-O3"]) for file in files]
    folder = build.ptx(units, architecture, build.BUILD / "tests")
    return Module(next(folder.glob(f"*{name}.ptx")))


def lines(file: str, name: str) -> list[int]:
    """Return the lines with a kernel's name in their comment."""
    text = (HERE / f"{file}.cu").read_text().splitlines()
    return [i for i, line in enumerate(text, 1) if re.search(rf"// {name}$", line)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("seed", SEEDS)
class TestOrdinaryKernels:
    """Kernels in the ordinary style compute the same in every order."""

    def test_transpose(self, architecture: str, seed: int) -> None:
        n = 70
        a, b = Array(c_float, range(n * n)), Array(c_float, n * n)
        module("transpose", architecture).launch(
            "transpose", (3, 3), (32, 8), a, b, c_int(n), seed=seed
        )
        assert all(b.view[i * n + j] == a.view[j * n + i] for i in range(n) for j in range(n))

    def test_sum_by_ticket(self, architecture: str, seed: int) -> None:
        x, sums, ticket = Array(c_float, range(1000)), Array(c_float, 5), Array(c_uint, [0])
        module("ordinary", architecture).launch(
            "sum_by_ticket", (5,), (128,), x, sums, ticket, c_int(1000), seed=seed
        )
        assert sums.view[0] == sum(range(1000))

    def test_neighbours(self, architecture: str, seed: int) -> None:
        x, ticket = Array(c_float, 10), Array(c_uint, [0])
        module("ordinary", architecture).launch("neighbours", (5,), (64,), x, ticket, seed=seed)
        assert list(x.view) == [0, 1, 2, 3, 4, 1, 2, 3, 4, 0]

    def test_reverse_in_warp(self, architecture: str, seed: int) -> None:
        x, out = Array(c_float, range(64)), Array(c_float, 64)
        module("ordinary", architecture).launch("reverse_in_warp", (1,), (64,), x, out, seed=seed)
        assert list(out.view) == [i ^ 16 for i in range(64)]

    def test_histogram(self, architecture: str, seed: int) -> None:
        values = random.Random(seed).choices(range(256), k=1000)
        x, bins = Array(c_ubyte, values), Array(c_uint, [0] * 256)
        module("ordinary", architecture).launch(
            "histogram", (3,), (96,), x, bins, c_int(1000), shared=1024, seed=seed
        )
        assert list(bins.view) == [values.count(i) for i in range(256)]

    def test_loops(self, architecture: str, seed: int) -> None:
        def steps(n: int) -> int:
            return 0 if n == 1 else 1 + steps(3 * n + 1 if n % 2 else n // 2)

        x, counts = Array(c_uint, range(1, 41)), Array(c_uint, 40)
        module("ordinary", architecture).launch("collatz", (1,), (40,), x, counts, seed=seed)
        assert list(counts.view) == [steps(n) for n in range(1, 41)]

    def test_bits(self, architecture: str, seed: int) -> None:
        numbers = [0, 1, 0x80000000, 0xFFFFFFFF, *random.Random(seed).choices(range(1 << 32), k=28)]
        out = Array(c_uint, 6 * len(numbers))
        module("ordinary", architecture).launch(
            "bits", (1,), (len(numbers),), Array(c_uint, numbers), out, seed=seed
        )
        expected: list[int] = []
        for a in numbers:
            b = a * 2654435761 % 2**32
            digits = f"{a:032b}"
            expected += [digits.count("1"), 32 - a.bit_length(), int(digits[::-1], 2)]
            expected += [(a & -a).bit_length(), ((b << 32 | a) << (a & 31)) >> 32 & 0xFFFFFFFF]
            expected += [b >> 24 << 24 | (b >> 16 & 255) << 16 | a & 0xFFFF]
        assert list(out.view) == expected

    def test_halves(self, architecture: str, seed: int) -> None:
        bits = range(seed, 0x10000, 977)
        halves = [struct.unpack("e", struct.pack("H", b))[0] for b in bits]
        halves = [h for h in halves if math.isfinite(h) and abs(h) < 20000][:64]
        x = Array(c_uint16, [struct.unpack("H", struct.pack("e", h))[0] for h in halves])
        threads = len(halves) // 2
        module("ordinary", architecture).launch(
            "scale_halves", (1,), (threads,), x, c_float(3.0), seed=seed
        )
        for before, after in zip(halves[: 2 * threads], x.view, strict=False):
            assert (
                struct.unpack("e", struct.pack("H", after))[0]
                == struct.unpack("e", struct.pack("e", before * 3 + 1))[0]
            )


@pytest.mark.parametrize("seed", SEEDS)
def test_copies_arrive_behind_their_wait(seed: int) -> None:
    """Stages of cp.async are read behind their wait and a barrier."""
    x, out = Array(c_float, range(320)), Array(c_float, 320)
    module("ordinary").launch("copy_in_stages", (1,), (64,), x, out, c_int(5), seed=seed)
    assert list(out.view) == [s * 64 + 63 - i for s in range(5) for i in range(64)]


FAULTS = {
    "shared_bounds": (64, "4 bytes at shared address 256, but the block has 256 bytes"),
    "global_bounds": (64, "beyond the allocation of 256 bytes|in no allocation"),
    "misaligned": (1, "not aligned to 8 bytes"),
    "shared_fresh": (64, "reads shared address 128, which nothing has written"),
    "exited": (64, "of which 32 have exited|deadlock"),
    "copy_in_flight": (64, "exits with cp.async in flight"),
    "divergent_shuffle": (32, "lanes"),
    "foreign_lane": (32, "reads lane 20, which is not in the mask"),
    "wrong_count": (64, "to which others came as one of|deadlock"),
    "deadlock": (64, "deadlock"),
    "trap": (64, "(?s)trap.*thread 40"),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_reported(name: str, seed: int) -> None:
    """A fault is reported with its source line, block and thread."""
    threads, what = FAULTS[name]
    with pytest.raises(Fault, match=what) as raised:
        module("faults").launch(name, (1,), (threads,), Array(c_int, [0] * 64), seed=seed)
    report = str(raised.value)
    assert report.startswith(name)
    for line in lines("faults", name):
        assert re.search(rf"faults\.ptx:\d+: .*faults\.cu:{line}\b", report)
    assert re.search(r"by: block 0,0,0 thread \d+ |deadlock", report)
    assert re.search(r"\n  hint: ", report)


def test_fresh_global_memory_is_reported() -> None:
    """A read of global memory that nothing has written is a fault."""
    module("faults").launch("global_fresh", (1,), (64,), Array(c_int, 64), Array(c_int, [0] * 64))
    partly = Array(c_int, 64)
    partly.view[:32] = range(32)
    with pytest.raises(Fault, match=r"nothing has written since its allocation") as raised:
        module("faults").launch("global_fresh", (1,), (64,), Array(c_int, 64), partly)
    assert f"faults.cu:{lines('faults', 'global_fresh')[0]}" in str(raised.value)


def test_freed_memory_is_reported() -> None:
    """A read of memory that is in no allocation is a fault."""
    freed, out = Array(c_int, [0] * 64), Array(c_int, 64)
    address = freed.pointer()
    del freed
    with pytest.raises(Fault, match="in no allocation"):
        module("faults").launch("global_fresh", (1,), (64,), out, address)


def race_arguments(name: str) -> tuple[tuple[int, ...], tuple[Array, ...]]:
    zeros = [0.0] * 256
    ticket = Array(c_uint, [0])
    if "fence" in name:
        return (3,), (Array(c_float, zeros), ticket)
    return {
        "early_ticket": ((3,), (Array(c_float, [0.0]), Array(c_float, 256), ticket)),
        "block_scope": ((2,), (ticket,)),
        "lanes_store": ((1,), (Array(c_float, 1),)),
        "plain_store": ((1,), (Array(c_float, 1),)),
    }.get(name, ((1,), (Array(c_float, zeros), Array(c_float, 256))))


RACES = re.findall(r"__global__ void (\w+)", (HERE / "races.cu").read_text())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", RACES)
def test_races_are_reported(name: str, seed: int) -> None:
    """A race is reported with the source lines of both accesses, whatever the order."""
    grid, arguments = race_arguments(name)
    with pytest.raises(Fault, match="race: ") as raised:
        module("races").launch(name, grid, (64,), *arguments, seed=seed)
    named = {int(line) for line in re.findall(r"races\.cu:(\d+)", str(raised.value))}
    assert named and named <= set(lines("races", name))


@pytest.mark.parametrize("seed", SEEDS)
def test_races_can_be_left_alone(seed: int) -> None:
    """A run without races has none reported."""
    executor.configure(races=0)
    try:
        grid, arguments = race_arguments("plain_store")
        module("races").launch("plain_store", grid, (64,), *arguments, seed=seed)
    finally:
        executor.configure(races=1)


def test_the_program_of_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first program of README transposes by the executor alone."""
    program = re.findall(
        r"```python\n(.*?)```", (HERE.parent / "README.md").read_text(), re.DOTALL
    )[0]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "transpose.cu").write_text((HERE.parent / "example/transpose.cu").read_text())
    exec(program, {})


def test_a_changed_header_is_compiled_again(tmp_path: Path) -> None:
    """PTX is compiled again when a header that its source includes has changed."""
    header, source = tmp_path / "value.h", tmp_path / "store.cu"
    source.write_text('#include "value.h"\nextern "C" __global__ void f(int* x) { *x = VALUE; }')
    for value in (3, 4):
        header.write_text(f"#define VALUE {value}\n")
        folder = build.ptx([(source, [])], "75", tmp_path / "ptx")
        out = Array(c_int, 1)
        Module(next(folder.glob("*.ptx"))).launch("f", (1,), (1,), out)
        assert out.view[0] == value
