"""Select the tests of the executor `cuda` for the fake CUDA runtime."""

from __future__ import annotations

import re

import pytest

# File, pattern of the end of a test's name in it, and the reason to leave it out.
LEFT_OUT = (
    ("test_launch_economy.py", r"elements_are_written\[cuda\]", "gigabytes"),
    (
        "test_updates.py",
        r"in_another_order\[negated-\w+-cuda\]",
        "torch's kernel that copies a negated view",
    ),
    ("test_gemm_sm90_cuda.py", "", "products of a size that takes the engine hours"),
)
OWN = ("test_fake_cuda.py", "test_cuda_runtime.py")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if not is_of_cuda(item)]
    files = {item.path.name for item in items}
    for file, name, _ in LEFT_OUT:
        found = [i for i in items if i.path.name == file and re.search(f"{name}$", i.name)]
        if file in files and not found and not any("::" in word for word in config.args):
            raise pytest.UsageError(f"fake_cuda/plugin.py: no test of {file} matches {name}")
        left_out += found
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


def is_of_cuda(item: pytest.Item) -> bool:
    """Whether a test is one of the runtime's own, or marked for a GPU."""
    if item.path.name in OWN:
        return True
    parameters = item.name[len(getattr(item, "originalname", item.name)) :].strip("[]").split("-")
    return "cuda" in parameters or re.search("_cuda|_gpu", item.name) is not None
