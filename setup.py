"""Build amp_ext: its one extension module, amp_ext._C, and the libraries of kernels that it loads.

CMake builds csrc/bindings, csrc/cpu and csrc/kernels. The metadata are in pyproject.toml.

Environment variables:
    FORCE_CPU=1            leave the CUDA kernels out
    FORCE_CUDA=1           fail where the CUDA kernels cannot be built
    TORCH_CUDA_ARCH_LIST   architectures of the kernels, in torch's syntax
    CUDA_HOME              the CUDA toolkit, by default the one whose nvcc is on PATH
    CXX                    the host compiler, c++ by default
    MAX_JOBS               how many compilers run at once
    DEBUG=1                -O0 -g
    AMP_EXT_LINEINFO=1     nvcc -lineinfo, for profilers
"""

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError, PlatformError

from build_backend import TORCH


def find_nvcc() -> tuple[str | None, str | None]:
    """Return nvcc and the version of its CUDA ("13.0"), or None twice."""
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=os.path.join(home, "bin") if home else None)
    text = nvcc and subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    return nvcc, (text and text.partition("release ")[2].partition(",")[0]) or None


def builds_kernels(force_cpu: bool, force_cuda: bool, nvcc: str | None, torch: str | None) -> bool:
    """Return whether to build the CUDA kernels, given the CUDA versions of nvcc and torch."""
    if force_cpu:
        obstacle = "FORCE_CPU is set"
    elif torch is None:
        obstacle = "the installed torch is not a CUDA build"
    elif nvcc is None:
        obstacle = "there is no nvcc on PATH or in CUDA_HOME"
    elif nvcc.split(".")[0] != torch.split(".")[0]:
        obstacle = f"nvcc is of CUDA {nvcc} and torch of CUDA {torch}"
    else:
        return True
    if force_cuda:
        raise PlatformError(f"FORCE_CUDA is set, but {obstacle}")
    print(f"amp_ext: the CUDA kernels are left out: {obstacle}")
    return False


def build(part: str, folder: str, **options: str | Path) -> list[Path]:
    """Build a part of csrc by CMake in a folder; return the files made."""
    # Object files alone remain of an earlier build, whose compilers may have been others.
    for old in Path(folder).glob("CMakeFiles/[0-9]*"):
        shutil.rmtree(old)
    Path(folder, "CMakeCache.txt").unlink(missing_ok=True)
    env = {"CMAKE_BUILD_PARALLEL_LEVEL": os.environ.get("MAX_JOBS", ""), **os.environ}
    found = importlib.util.find_spec("cmake")
    if found and found.origin:  # a wheel's, with ninja beside it; those on PATH may be older
        env["PATH"] = f"{Path(found.origin).parents[4]}/bin{os.pathsep}{env['PATH']}"
    configure = ["cmake", "-G", "Ninja", "-S", "csrc", "-B", folder, f"-DAMP_EXT_PART={part}"]
    configure += [f"-D{name}={value}" for name, value in options.items()]
    for command in (configure, ["cmake", "--build", folder]):
        if subprocess.run(command, env=env).returncode:
            raise CompileError(
                f"csrc/{part} did not compile, for the reasons above: the build needs a C++20 "
                "compiler, named in CXX or installed (apt install g++), CMake 3.26, ninja and "
                "Python's headers; a wheel needs none of them"
            )
    return list(Path(folder).glob("*.so"))


def install(files: list[Path], folder: Path) -> None:
    """Copy files to a folder, and remove the libraries of an earlier build there.

    The copies get a new time: distutils replaces older files only.
    """
    for old in (*folder.glob("libamp_ext_*.so"), *(folder / file.name for file in files)):
        old.unlink(missing_ok=True)  # a running program may have it mapped
    for file in files:
        shutil.copy(file, folder)


class BuildPackage(build_py):
    """Leave out the modules of an earlier build, some of which may be gone."""

    def run(self):
        shutil.rmtree(Path(self.build_lib, "amp_ext"), ignore_errors=True)
        super().run()


class BuildExtension(build_ext):
    """Compile amp_ext._C and the libraries, and write amp_ext/_build_info.py beside them."""

    def build_extension(self, ext):
        import torch

        if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
            raise PlatformError(f"torch {torch.__version__} is too old: pip install '{TORCH}'")
        forced = (os.environ.get(f"FORCE_{kind}", "0") not in ("", "0") for kind in ("CPU", "CUDA"))
        nvcc, version = find_nvcc()
        cuda = torch.version.cuda if builds_kernels(*forced, version, torch.version.cuda) else None
        # Each Python and each torch finds its own objects again; the libraries serve all of them.
        kind = f"torch{torch.__version__}-{'cuda' if cuda else 'cpu'}"
        Path("build").mkdir(exist_ok=True)
        with open("build/.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            files = build("cpu", "build/cpu")
            if cuda:
                files += build("kernels", f"build/cuda{version}", CMAKE_CUDA_COMPILER=nvcc)
            files += build(
                "bindings",
                f"build/{sysconfig.get_config_var('SOABI')}-{kind}",
                Python_EXECUTABLE=sys.executable,
                AMP_EXT_TORCH=Path(torch.__file__).parent,
                CUDAToolkit_NVCC_EXECUTABLE=nvcc if cuda else "",
            )
        folder = Path(self.get_ext_fullpath(ext.name)).parent
        self.mkpath(str(folder))
        install(files, folder)
        (folder / "_build_info.py").write_text(
            '"""What amp_ext was built for; written by setup.py."""\n\n'
            f"TORCH_VERSION = {str(torch.__version__)!r}\nCUDA_VERSION = {cuda!r}\n"
        )

    def copy_extensions_to_source(self):
        super().copy_extensions_to_source()
        built = Path(self.build_lib, "amp_ext")
        install([built / "_build_info.py", *built.glob("libamp_ext_*.so")], Path("amp_ext"))


if __name__ == "__main__":
    setup(
        license="BSD-3-Clause",
        install_requires=[TORCH],
        ext_modules=[Extension("amp_ext._C", [])],
        cmdclass={"build_py": BuildPackage, "build_ext": BuildExtension},
    )
