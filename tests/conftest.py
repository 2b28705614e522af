"""Set-up of every test: reproducible random numbers, and memory that nobody has written shows."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

# Before torch starts: OpenMP's threads would spin while they wait for work, which is half of the
# suite's time. Several workers of pytest-xdist share the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "2")

import torch

os.environ.setdefault(
    "AMP_EXT_GEMM", "kernel"
)  # where there is a GPU, its tests are of the kernels
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

# So that their assertions show the values.
pytest.register_assert_rewrite("cases", "cast_cases", "gemm_cases", "autocast_cases", "twins")
torch.sparse.check_sparse_tensor_invariants.enable()  # torch warns while it is left undecided


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    parser.addoption(
        "--hostile-calls", type=int, default=200, help="calls of each seed in test_hostile_calls.py"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "simt: CPU tensors go to the CUDA kernels, by tests/simt")
    config.addinivalue_line("markers", "slow: takes gigabytes or minutes; run with --slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="takes gigabytes or minutes: --slow runs it"))
    products = collections.defaultdict(list)
    for item in items:
        if INTERPRETED_RARELY.match(item.path.name) and is_interpreted(item):
            products[item.path, item.originalname].append(item)
    for cases in products.values():
        for index, item in enumerate(cases):
            if index % 8:
                item.add_marker(
                    pytest.mark.skip(reason="takes the interpreter long: --slow runs it")
                )


# Products, which take Triton's interpreter seconds each: of each test's cases it runs the first and
# every eighth after it.
INTERPRETED_RARELY = re.compile(r"test_(gemm|linear|nn|accumulate_grad)")


def is_interpreted(item: pytest.Item) -> bool:
    return getattr(parameters_of(item).get("executor"), "interpreted", False)


def parameters_of(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> None:
    """Seed torch from the test's node id: the same numbers alone and within the whole suite."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def backend(request: pytest.FixtureRequest, seed: None) -> Iterator[None]:
    """Choose the backend of the test's executor, or simt where it is marked so."""
    from executors import SIMT

    executor = parameters_of(request.node).get("executor")
    if executor is None and request.node.get_closest_marker("simt"):
        executor = SIMT
        if SIMT.missing:
            pytest.skip(SIMT.missing)
    with executor.chosen() if executor else contextlib.nullcontext():
        yield


@pytest.fixture
def simt(backend: None) -> Any:
    """The library of the backend simt, for tests marked so."""
    from simt.backend import simt

    return simt()


@pytest.fixture(autouse=True)
def nan_in_fresh_memory(seed: None) -> Iterator[None]:
    """Make torch.empty return NaN, so that a result that was not written cannot look right.

    torch.utils.deterministic.fill_uninitialized_memory, which is on by default, takes effect only
    while deterministic algorithms are asked for.
    """
    asked = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(asked)
