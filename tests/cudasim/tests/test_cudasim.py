"""Test the executor of PTX: its results, and the faults and races it finds."""

import itertools
import random
import re
import struct
from collections.abc import Callable, Sequence
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
    files = ["ordinary"]
    if architecture != "75":
        files += ["faults", "races"]
    units = [((HERE / f"{file}.cu").resolve(), ["-O3"]) for file in files]
    folder = build.ptx(units, architecture, build.BUILD / "tests")
    return Module(next(folder.glob(f"*{name}.ptx")))


def lines(file: str, name: str) -> list[int]:
    """Return the lines with a kernel's name in their comment."""
    text = (HERE / f"{file}.cu").read_text().splitlines()
    return [i for i, line in enumerate(text, 1) if re.search(rf"// {name}$", line)]


@pytest.fixture(params=itertools.product(ARCHITECTURES, SEEDS), ids=str)
def run(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return a function that runs an ordinary kernel in one of the orders."""
    architecture, seed = request.param

    def run(name: str, grid: Sequence[int], *arguments: object, shared: int = 0) -> None:
        module("ordinary", architecture).launch(name, grid, *arguments, shared=shared, seed=seed)

    return run


class TestOrdinaryKernels:
    """Kernels in the ordinary style compute the same in every order."""

    def test_sum_by_ticket(self, run: Callable[..., None]) -> None:
        x, sums, ticket = Array(c_float, range(1000)), Array(c_float, 5), Array(c_uint, [0])
        run("sum_by_ticket", (5,), (128,), x, sums, ticket, c_int(1000))
        assert sums.view[0] == sum(range(1000))

    def test_neighbours(self, run: Callable[..., None]) -> None:
        x, ticket = Array(c_float, 10), Array(c_uint, [0])
        run("neighbours", (5,), (64,), x, ticket)
        assert list(x.view) == [0, 1, 2, 3, 4, 1, 2, 3, 4, 0]

    def test_reverse_in_warp(self, run: Callable[..., None]) -> None:
        x, out = Array(c_float, range(64)), Array(c_float, 64)
        run("reverse_in_warp", (1,), (64,), x, out)
        assert list(out.view) == [i ^ 16 for i in range(64)]

    def test_histogram(self, run: Callable[..., None]) -> None:
        values = random.Random(0).choices(range(256), k=1000)
        x, bins = Array(c_ubyte, values), Array(c_uint, [0] * 256)
        run("histogram", (3,), (96,), x, bins, c_int(1000), shared=1024)
        assert list(bins.view) == [values.count(i) for i in range(256)]

    def test_loops(self, run: Callable[..., None]) -> None:
        def steps(n: int) -> int:
            return 0 if n == 1 else 1 + steps(3 * n + 1 if n % 2 else n // 2)

        x, counts = Array(c_uint, range(1, 41)), Array(c_uint, 40)
        run("collatz", (1,), (40,), x, counts)
        assert list(counts.view) == [steps(n) for n in range(1, 41)]

    def test_bits(self, run: Callable[..., None]) -> None:
        numbers = [0, 1, 0x80000000, 0xFFFFFFFF, *random.Random(0).choices(range(1 << 32), k=28)]
        out = Array(c_uint, 6 * len(numbers))
        run("bits", (1,), (len(numbers),), Array(c_uint, numbers), out)
        expected: list[int] = []
        for a in numbers:
            b = a * 2654435761 % 2**32
            digits = f"{a:032b}"
            expected += [digits.count("1"), 32 - a.bit_length(), int(digits[::-1], 2)]
            expected += [(a & -a).bit_length(), ((b << 32 | a) << (a & 31)) >> 32 & 0xFFFFFFFF]
            expected += [b >> 24 << 24 | (b >> 16 & 255) << 16 | a & 0xFFFF]
        assert list(out.view) == expected

    def test_halves(self, run: Callable[..., None]) -> None:
        packed = struct.pack("64e", *(1e-7 * (-1.45) ** i for i in range(64)))
        x = Array(c_uint16, struct.unpack("64H", packed))
        run("scale_halves", (1,), (32,), x, c_float(3.0))
        assert bytes(x.view) == struct.pack(
            "64e", *(3 * h + 1 for h in struct.unpack("64e", packed))
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


def race(name: str, seed: int) -> None:
    zeros, ticket = Array(c_float, [0.0] * 256), Array(c_uint, [0])
    grid, arguments = {
        "early_ticket": (3, (zeros, Array(c_float, 256), ticket)),
        "block_scope": (2, (ticket,)),
        "lanes_store": (1, (zeros,)),
        "plain_store": (1, (zeros,)),
    }.get(name, (3, (zeros, ticket)) if "fence" in name else (1, (zeros, Array(c_float, 256))))
    module("races").launch(name, (grid,), (64,), *arguments, seed=seed)


RACES = re.findall(r"__global__ void (\w+)", (HERE / "races.cu").read_text())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", RACES)
def test_races_are_reported(name: str, seed: int) -> None:
    """A race is reported with the source lines of both accesses, whatever the order."""
    with pytest.raises(Fault, match="race: ") as raised:
        race(name, seed)
    named = {int(line) for line in re.findall(r"races\.cu:(\d+)", str(raised.value))}
    assert named and named <= set(lines("races", name))


def test_races_can_be_left_alone(request: pytest.FixtureRequest) -> None:
    """A run without races has none reported."""
    executor.configure(races=0)
    request.addfinalizer(lambda: executor.configure(races=1))
    race("plain_store", seed=0)


def test_the_program_of_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first program of README runs a kernel by the executor alone."""
    program = re.findall(
        r"```python\n(.*?)```", (HERE.parent / "README.md").read_text(), re.DOTALL
    )[0]
    monkeypatch.chdir(HERE)
    exec(program.replace("build/ptx", str(tmp_path)), {})


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
