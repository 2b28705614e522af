"""Test that a foreign extension module or library is refused in one sentence with a command."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import amp_ext
import programs
from amp_ext._library import _C, LIBRARIES, check_build

# One sentence, without a stop inside, that ends with a command.
SENTENCE = r"^amp_ext [^\n]*(rebuild|build) it [^\n]*: (\w+=\S+ )?pip install \S.*$"


def import_error(package: Path) -> str:
    """Return the last line of a failing import, in a process of its own."""
    process = programs.run_with(package.parent, "-c", "import amp_ext")
    assert process.returncode == 1, process.stderr
    last = process.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: "), process.stderr
    return last.removeprefix("ImportError: ")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a copy of the installed package."""
    source = Path(amp_ext.__file__).parent
    return shutil.copytree(
        source, tmp_path / "amp_ext", ignore=shutil.ignore_patterns("__pycache__")
    )


def test_module_built_against_another_torch(package: Path) -> None:
    info = (package / "_build_info.py").read_text()
    other = info.replace(torch.__version__, "1.13.1+other")
    assert other != info
    (package / "_build_info.py").write_text(other)
    message = import_error(package)
    assert re.match(SENTENCE, message), message
    assert "built against torch 1.13.1+other" in message
    assert f"torch {torch.__version__} is installed" in message


@pytest.mark.parametrize(
    ("built_against", "installed", "fits"),
    [
        ("2.14.0+cu130", "2.14.1+cu130", True),
        ("2.14.0", "2.14.1", True),
        ("2.14.0+cu130", "2.15.0+cu130", False),
        ("2.1.0+cu130", "2.11.0+cu130", False),
        ("2.14.0+cu130", "2.14.0+cu126", False),
        ("2.14.0+cu130", "2.14.1+cpu", False),
        ("2.14.0+cu130", "2.14.1", False),
        ("2.15.0a0+git1a2b3c4", "2.15.0a0+git1a2b3c4", True),
        ("2.15.0a0+git1a2b3c4", "2.15.0a0+git5d6e7f8", False),
        ("2.15.0.dev20261101+cu130", "2.15.0.dev20261102+cu130", False),
        ("2.15.0+cu130", "2.15.1.dev20261102+cu130", False),
    ],
)
def test_patch_releases_of_one_build_fit(built_against: str, installed: str, fits: bool) -> None:
    if fits:
        check_build(built_against, installed)
    else:
        with pytest.raises(ImportError, match=SENTENCE):
            check_build(built_against, installed)


OTHER = """
#include <cstdlib>
extern "C" const struct {
  const char* abi;
  const char* version;
  void (*backend)();
} amp_ext_backend_library{"another", "0.0.9", [] { abort(); }};
"""


def compiled(into: Path, text: str) -> Path:
    command = [os.environ.get("CXX", "c++"), "-shared", "-fPIC", "-xc++", "-", "-o", str(into)]
    subprocess.run(command, input=text, text=True, check=True)
    return into


OURS = rf"{re.escape(amp_ext.__version__)} needs [0-9a-f]{{16}};"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "does not load .*: No such file"),
        (OTHER, rf"is of amp_ext 0\.0\.9 with the interface another, where amp_ext {OURS}"),
        ("int nothing;", "has no symbol amp_ext_backend_library"),
        ("", "does not load"),
    ],
    ids=["missing", "older", "other", "empty"],
)
def test_library_that_does_not_fit(package: Path, text: str | None, expected: str) -> None:
    library = package / LIBRARIES[-1].name
    library.unlink()  # others may have it mapped
    if text:
        compiled(library, text)
    elif text is not None:
        library.touch()
    message = import_error(package)
    assert re.match(SENTENCE, message), message
    assert re.search(expected, message) and library.name in message, message


def test_a_refused_library_leaves_the_loaded_one(tmp_path: Path) -> None:
    other = compiled(tmp_path / "other.so", OTHER)
    with pytest.raises(ImportError, match=r"amp_ext 0\.0\.9 with the interface.*; do this$"):
        _C.load_backend(str(other), "do this")
    assert str(other) not in Path("/proc/self/maps").read_text()
    assert amp_ext.ops.gemm(torch.ones(2, 2).half(), torch.ones(2, 2).half()).eq(2).all()


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_one_file_serves_all_versions_of_torch_and_python(library: Path) -> None:
    def symbols(kind: str) -> list[str]:
        command = ["nm", "-D", "--without-symbol-versions", f"--{kind}-only", str(library)]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return [line.split()[-1] for line in lines.splitlines()]

    assert symbols("defined") == ["amp_ext_backend_library"]
    foreign = r"^_?Py|torch|c10|_ZN2at|GOMP|omp_|caffe"
    assert not [name for name in symbols("undefined") if re.search(foreign, name)]
    dynamic = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True)
    needed = re.findall(r"NEEDED.*\[(.+?)\.so", dynamic.stdout)
    assert set(needed) <= {"libstdc++", "libm", "libgcc_s", "libc", "ld-linux-x86-64", "libcudart"}
    assert ("libcudart" in needed) == ("cuda" in library.name)
