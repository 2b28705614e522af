"""pytest on the fake CUDA runtime: the tests of the executor `cuda`, but for those named here."""

from __future__ import annotations

import re

import pytest

# By what the end of a test's id matches.
LEFT_OUT = {
    r"test_more_than_2_to_the_31_elements\[cuda\]": "gigabytes",
    r"test_is_torchs_activation\[gelu-cuda\]": "the error of torch's own kernel, here the CPU's",
    r"test_refusals\[sparse grad-cuda\]": "a sparse tensor's kernels, which are not dispatched",
    r"test_gemm_sm90_cuda\.py::.*": "products of a size that takes the engine hours",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if not is_of_cuda(item) or why_left_out(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


def is_of_cuda(item: pytest.Item) -> bool:
    """Whether it is one of the tests of this folder, or says that it is for a GPU."""
    if item.path.parent.name == "fake_cuda":
        return True
    parameters = item.name[len(getattr(item, "originalname", item.name)) :].strip("[]").split("-")
    return "cuda" in parameters or re.search("_cuda|_gpu", item.name) is not None


def why_left_out(item: pytest.Item) -> str:
    """Return why a test does not run here; empty if it does."""
    return next((why for end, why in LEFT_OUT.items() if re.search(f"{end}$", item.nodeid)), "")
