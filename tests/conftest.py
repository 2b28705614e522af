"""Set up every test: reproducible random numbers, and NaN in memory without a value."""

import contextlib
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# The policy must be set before torch starts: OpenMP's threads would spin while they wait, half of
# the suite's time. Several workers of pytest-xdist share the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "2")

import torch

# A GPU's tests run the kernels, and a wrong kernel fails its tests. A user's measurements have no
# effect.
os.environ.setdefault("AMP_EXT_GEMM", "kernel")
os.environ.setdefault("AMP_EXT_VERIFY", "0")
CACHE = Path(__file__).parents[1] / "build" / "cache"
os.environ["XDG_CACHE_HOME"] = str(CACHE)
if "PYTEST_XDIST_WORKER" not in os.environ:
    shutil.rmtree(CACHE / "amp_ext", ignore_errors=True)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

# Assertions of these modules show values.
pytest.register_assert_rewrite("cases", "gemm_cases", "optim_cases", "autocast_cases", "twins")
torch.sparse.check_sparse_tensor_invariants.enable()  # torch warns while it is left undecided


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--hostile-calls", type=int, default=200, help="calls of each seed in test_hostile_calls.py"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fake_cuda: needs tests/fake_cuda/run.py")
    config.addinivalue_line("markers", "gpu: runs kernels on a GPU, by `make gpu`")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests that run kernels on a GPU: `pytest -m gpu`."""
    executor = parameters_of(item).get("executor")
    on_gpu = getattr(getattr(executor, "device", None), "type", "") == "cuda"
    named = re.search("cuda|on_a_gpu", f"{item.path.name}::{item.name}")
    folders = item.path.relative_to(item.config.rootpath).parts
    if on_gpu or (named and not {"build", "cudasim", "probe"} & set(folders)):
        item.add_marker("gpu")


def pytest_report_header() -> str:
    from executors import absent

    return f"cannot run here: {', '.join(absent()) or 'nothing'}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out devices that are not here, and interpreted products that are not listed."""

    def is_left_out(item: pytest.Item) -> bool:
        if any("empty parameter set" in mark.kwargs.get("reason", "") for mark in item.own_markers):
            return True
        if not (OF_PRODUCTS.match(item.path.name) and is_interpreted(item)):
            return False
        from executors import is_interpreted_product

        others = item.callspec.id.removesuffix("triton").removesuffix("-")
        return not is_interpreted_product(item.originalname, others)

    left_out = [item for item in items if is_left_out(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


OF_PRODUCTS = re.compile(r"test_gemm")


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
    """Choose the backend of the test's executor, or cuda for a test of the fake CUDA runtime."""
    import amp_ext
    from executors import ON_CUDA
    from fake_cuda.recorder import is_running

    executor = parameters_of(request.node).get("executor")
    if executor is None and request.node.get_closest_marker("fake_cuda"):
        if not is_running():
            pytest.skip("needs tests/fake_cuda/run.py")
        executor = ON_CUDA
    before = amp_ext.get_backend()
    with executor.chosen() if executor else contextlib.nullcontext():
        yield
    amp_ext.set_backend(before)


@pytest.fixture(autouse=True)
def nan_in_fresh_memory(seed: None) -> Iterator[None]:
    """Make torch.empty return NaN, so that a result without a write cannot look right.

    torch.utils.deterministic.fill_uninitialized_memory is on by default, and takes effect only
    while deterministic algorithms are on.
    """
    asked = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(asked)
