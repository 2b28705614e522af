"""End the process of a test that hangs, or that spoils its process on a GPU.

    pytest -n 8 --dist worksteal -p gpu_fault [--test-limit 40] [--tests 10]

A kernel that faults makes every later call of CUDA in its process fail, and one that hangs does not
return. The process ends therefore; pytest-xdist starts another, and reports a crash of the worker
at this test. Without pytest-xdist, a hanging test only prints its stack.
"""

import faulthandler
import os
import sys
from collections.abc import Generator

import pytest

STDERR = os.dup(2)  # pytest will capture it, and would keep the output to the end
WORKER = "PYTEST_XDIST_WORKER" in os.environ


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--test-limit", type=float, default=40, help="seconds that a test may take")
    parser.addoption("--tests", type=int, help="how many to run of all that are selected")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if count := config.getoption("tests"):
        items[:] = items[:: max(1, len(items) // count)][:count]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    limit = item.config.getoption("test_limit")
    faulthandler.dump_traceback_later(limit, exit=WORKER, file=STDERR)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        if WORKER and is_spoilt():
            os._exit(1)


def is_spoilt() -> bool:
    """Whether CUDA calls of this process fail from now on."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
