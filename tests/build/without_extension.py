"""Run Python, such as pytest, with a copy of amp_ext that has no extension module.

    python tests/build/without_extension.py FOLDER -m pytest tests/scaler

The copy is made in FOLDER. As a plugin of pytest this module skips, with its reason, what asks for
the extension module: by the sentence of amp_ext._library.need_extension, or by a name of amp_ext._C
that amp_ext._python does not have.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_FOLDER = "AMP_EXT_WITHOUT_EXTENSION"
ROOT = Path(__file__).resolve().parents[2]
BUILD_INFO = "EXTENSION = False\nTORCH_VERSION = CUDA_VERSION = None\n"
ASKS = "needs amp_ext's extension module", "module 'amp_ext._python' has no attribute"

_STEPS = "on a CPU torch makes the steps of amp_ext.optim, of unscaled gradients"
KERNELS_ALONE = {
    r"test_gradients_are_only_read_where_the_step_clips\[amp_ext": _STEPS,
    r"test_refused_parameters|test_what_is_left_to_the_step": _STEPS,
    r"test_skipped_steps_do_not_count\[amp_ext": _STEPS,
    r"test_no_launch_makes_the_scalars": "an op is several of torch's",
    r"test_graph_breaks": "programs that are compiled with the scaler's calls break more often",
    r"test_modes_see_calls\[Dispatched\]": "a mode sees torch's ops in the place of a product",
}


def copy_package(folder: Path) -> Path:
    package = folder / "amp_ext"
    left_out = shutil.ignore_patterns("_C.*", "__pycache__", "_build_info.py")
    shutil.copytree(ROOT / "amp_ext", package, ignore=left_out, dirs_exist_ok=True)
    kernels = package / "triton_kernels"
    shutil.copytree(ROOT / "triton_kernels", kernels, ignore=left_out, dirs_exist_ok=True)
    (package / "_build_info.py").write_text(BUILD_INFO)
    return package


def environment(folder: Path) -> dict[str, str]:
    copy_package(folder)
    paths = [str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, paths))
    return {**os.environ, "PYTHONPATH": path, _FOLDER: str(folder)}


if __name__ != "__main__" and _FOLDER in os.environ:  # before pytest puts the source tree first
    sys.path.insert(0, os.environ[_FOLDER])
    import amp_ext  # noqa: F401


def pytest_configure(config: pytest.Config) -> None:
    import amp_ext
    from amp_ext._library import _C, EXTENSION

    assert not EXTENSION, amp_ext.__file__
    amp_ext._C = sys.modules["amp_ext._C"] = _C  # tests import it by this name
    sys.path.insert(0, str(ROOT / "tests"))
    from simt import build

    build.missing = lambda: "amp_ext has no extension module"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for pattern, reason in KERNELS_ALONE.items():
            if re.search(pattern, item.nodeid):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    report = yield
    said = str(call.excinfo.value) if call.excinfo is not None else ""
    if report.failed and any(words in said for words in ASKS):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1], said.partition("\n")[0])
    return report


def main() -> None:
    folder, *python = sys.argv[1:]
    given = environment(Path(folder).resolve())
    if python[:2] == ["-m", "pytest"]:
        python[2:2] = ["-p", "without_extension"]
    os.execve(sys.executable, [sys.executable, *python], given)


if __name__ == "__main__":
    main()
