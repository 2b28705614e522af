"""Select the tests of the executor `cuda` for the fake CUDA runtime."""

import re

import pytest

LEFT_OUT = re.compile(
    r"test_launch_economy\.py::.*elements_are_written\[cuda\]$"  # gigabytes
    # torch's kernel that copies a negated view
    r"|test_updates\.py::.*in_another_order\[negated-\w+-cuda\]$"
    r"|test_gemm_sm90_cuda\.py::"  # products of a size that takes the engine hours
)
OF_THE_RUNTIME = "test_cuda_runtime.py"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [i for i in items if not is_of_cuda(i) or LEFT_OUT.search(i.nodeid)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


def is_of_cuda(item: pytest.Item) -> bool:
    """Whether a test is for the runtime, or for it alone, or for a GPU."""
    if item.path.name == OF_THE_RUNTIME or item.get_closest_marker("fake_cuda"):
        return True
    parameters = item.name[len(getattr(item, "originalname", item.name)) :].strip("[]").split("-")
    return "cuda" in parameters or re.search("_cuda|_gpu", item.name) is not None
