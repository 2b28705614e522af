"""Build amp_ext: its one extension module, amp_ext._C, and the libraries of kernels that it loads.

The libraries need neither torch nor Python: one file serves all versions of them. The metadata are
in pyproject.toml.

Environment variables:
    FORCE_CPU=1            leave the CUDA kernels out
    FORCE_CUDA=1           fail where the CUDA kernels cannot be built
    TORCH_CUDA_ARCH_LIST   architectures of the kernels, by default those of DEFAULT_ARCHES that
                           nvcc knows
    CUDA_HOME              the CUDA toolkit, by default the one whose nvcc is on PATH
    CXX                    the host compiler, c++ by default
    MAX_JOBS               how many compilers run at once
    DEBUG=1                -O0 -g
    AMP_EXT_LINEINFO=1     nvcc -lineinfo, for profilers
"""

import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError, PlatformError

from build_backend import TORCH

ROOT = Path(__file__).resolve().parent
CPU_LIBRARY, CUDA_LIBRARY = "libamp_ext_cpu.so", "libamp_ext_cuda.so"
DEFAULT_ARCHES = ["7.5", "8.0+PTX", "9.0a", "10.0", "12.0"]

# Units compile in parallel, and each reads torch's headers once.
MODULE_UNITS = 2

# Compiled once per instruction set; which one runs is decided at run time.
SIMD_SOURCES = {"span.cpp", "rows.cpp", "update.cpp"}
SIMD_FLAGS = {
    "baseline": "",
    "avx2": "-mavx2 -mfma -mf16c",
    "avx512": "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512",
}


class Toolkit(NamedTuple):
    """Describe a CUDA toolkit: nvcc, its version ("13.0"), folder and architectures ("80")."""

    nvcc: str
    version: str
    root: Path
    arches: frozenset[str] = frozenset()


Unit = tuple[Path, str, list[str]]  # source, object file, flags


def env_flag(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


def version() -> str:
    text = (ROOT / "amp_ext/__init__.py").read_text()
    return re.search(r'^__version__ = "(.+)"', text, re.MULTILINE)[1]


def parse_arch_list(text: str, known: Collection[str]) -> list[str]:
    """Split a list in torch's syntax, such as "8.0+PTX;9.0a" or "8.0 8.6".

    An empty list stands for those of DEFAULT_ARCHES that nvcc knows (`known`: "75", "80"). 9.0
    becomes 9.0a: the Hopper kernels need it, and the same GPUs run it. 9.0+PTX remains for later
    GPUs.
    """
    arches = []
    for arch in text.replace(";", " ").split():
        if not re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", arch):
            raise PlatformError(f"TORCH_CUDA_ARCH_LIST takes 8.0+PTX or 9.0a, but not {arch!r}")
        if arch in ("9.0", "9.0+PTX"):
            print("amp_ext: for 9.0 code for 9.0a is built, which the Hopper GEMM kernels need")
            arches.append("9.0a")
        if arch != "9.0":
            arches.append(arch)
    return arches or [arch for arch in DEFAULT_ARCHES if str(number(arch)) in known]


def number(arch: str) -> int:
    """Return 80 for 8.0+PTX, 90 for 9.0a."""
    return int(re.sub(r"\D", "", arch))


def arches_of(source: Path, arches: list[str]) -> list[str]:
    """Return the architectures to compile a kernel file for. A file without any is left out."""
    if source.parent.name == "sm90":
        return [arch for arch in arches if arch.removesuffix("+PTX") == "9.0a"]
    if source.parent.name == "sm80":
        # Later GPUs run these kernels where those of their own architecture refuse a product. PTX
        # is enough for 10.x and 11.x, whose tensor cores have other instructions (tcgen05).
        has_ptx = any(re.fullmatch(r"(8\.\d|9\.0)\+PTX", arch) for arch in arches)
        left_out = range(100, 120) if has_ptx else ()
        return [arch for arch in arches if number(arch) >= 80 and number(arch) not in left_out]
    return arches


def gencode_flags(arches: list[str]) -> list[str]:
    flags = []
    for arch in arches:
        name = arch.removesuffix("+PTX").replace(".", "")
        codes = ["sm", "compute"] if arch.endswith("+PTX") else ["sm"]
        flags += [f"-gencode=arch=compute_{name},code={code}_{name}" for code in codes]
    return flags


def find_toolkit() -> Toolkit | None:
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=os.path.join(home, "bin") if home else None)
    if nvcc is None:
        return None
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    dryrun = subprocess.run([nvcc, "--dryrun", "x.cu"], capture_output=True, text=True).stderr
    arches = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True).stdout
    # nvcc itself may be a wrapper elsewhere.
    root = Path(re.search(r"^#\$ TOP=(.+)$", dryrun, re.MULTILINE)[1]).resolve()
    number = re.search(r"release (\d+\.\d+)", version)[1]
    return Toolkit(nvcc, number, root, frozenset(re.findall(r"compute_(\d+)", arches)))


def require_compiler() -> None:
    compiler, *_ = shlex.split(os.environ.get("CXX") or "c++")
    if shutil.which(compiler) is None:
        raise PlatformError(
            f"amp_ext needs a C++20 compiler, and there is no {compiler}: install one (apt install "
            "g++), name it in CXX, or install a wheel of amp_ext for this torch"
        )


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


# ---- what is compiled --------------------------------------------------------------------------


def abi() -> str:
    """Return the hash of the headers that amp_ext._C and the libraries have to share."""
    digest = hashlib.sha256()
    for header in sorted((ROOT / "csrc/include").rglob("*.h")):
        digest.update(b"%s\0%s\0" % (header.name.encode(), header.read_bytes()))
    return digest.hexdigest()[:16]


def identity() -> list[str]:
    """Return the flags that give a library the version and the ABI that it reports when loaded."""
    return [f'-DAMP_EXT_ABI="{abi()}"', f'-DAMP_EXT_VERSION="{version()}"']


def common_flags() -> list[str]:
    return ["-std=c++20", "-Icsrc/include", *(["-O0", "-g"] if env_flag("DEBUG") else ["-O3"])]


def host_flags() -> list[str]:
    return [*common_flags(), "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]


def cuda_folders(torch_dir: Path, toolkit: Toolkit) -> list[Path]:
    """Return the folders with CUDA's headers and runtime: the toolkit, and wheels beside torch."""
    # CUDA 13's wheels share a folder; each of CUDA 12's has its own.
    own = f"cu{toolkit.version.split('.')[0]}"
    found = [path for path in torch_dir.parent.glob("nvidia/*") if path.is_dir()]
    wheels = [path for path in found if path.name == own or not re.fullmatch(r"cu\d+", path.name)]
    wheels.sort(key=lambda path: (path.name != own, path.name))
    return [toolkit.root, *wheels]


def cuda_runtime(folders: list[Path]) -> str:
    """Return the CUDA runtime to link with. Wheels have it without the name that -l looks for."""
    found = [path for top in folders for path in sorted(top.glob("lib*/libcudart.so*"))]
    if not found:
        raise PlatformError(
            "there is no CUDA runtime (libcudart.so) in the CUDA toolkit or beside torch: "
            "pip install nvidia-cuda-runtime, or set FORCE_CPU=1"
        )
    return str(found[0])


def module_units(torch_dir: Path, cuda: list[Path]) -> list[Unit]:
    """Return the units of amp_ext._C. `cuda` lists the cuda_folders of a CUDA build."""
    # at::parallel_for is serial without -fopenmp. GCC 12 takes reads in torch's headers for writes
    # past an end.
    flags = [*host_flags(), "-Wno-stringop-overflow", "-fopenmp", "-Icsrc/bindings"]
    system = [torch_dir / "include", sysconfig.get_path("include")]
    system += [top / "include" for top in cuda]
    flags += [f"-isystem{path}" for path in system]
    flags += identity()
    left_out = Path("csrc/bindings/backends", "none.cpp" if cuda else "cuda.cpp")
    sources = sorted(Path("csrc/bindings").rglob("*.cpp"))
    units = []
    for number in range(MODULE_UNITS):
        *before, last = (path for path in sources[number::MODULE_UNITS] if path != left_out)
        own = [f"-include{file}" for file in before]
        units.append((last, f"csrc/bindings{number}.o", [*flags, *own]))
    return units


def cpu_units() -> list[Unit]:
    """Return the units of libamp_ext_cpu.so."""
    units: list[Unit] = []
    x86 = platform.machine() in ("x86_64", "AMD64")
    # Square roots and conditions are vectorised where they need not set errno or trap.
    cpu = [
        *host_flags(),
        "-Icsrc/cpu",
        "-fopenmp-simd",
        "-fno-math-errno",
        "-fno-trapping-math",
        *(["-DAMP_EXT_X86"] if x86 else []),
    ]
    for source in sorted(Path("csrc/cpu").rglob("*.cpp")):
        # Fused multiply-adds would make results depend on the instruction set. Only matrix
        # products, whose order of summation is open, may have them.
        contract = "fast" if source.name == "rows.cpp" else "off"
        for isa in SIMD_FLAGS if x86 and source.name in SIMD_SOURCES else ["baseline"]:
            flags = [*cpu, f"-ffp-contract={contract}", f"-DAMP_EXT_ISA={isa}"]
            flags += SIMD_FLAGS[isa].split() + (identity() if source.name == "library.cpp" else [])
            units.append((source, f"{source}.{isa}.o", flags))
    return units


def cuda_units(arches: list[str]) -> list[Unit]:
    """Return the units of libamp_ext_cuda.so."""
    host = Path("csrc/kernels/library.cpp")
    made_for = f'-DAMP_EXT_ARCHITECTURES="{" ".join(arches)}"'
    units = [(host, f"{host}.o", [*host_flags(), *identity(), made_for, "-Icsrc/kernels"])]
    sources = sorted(Path("csrc/kernels").rglob("*.cu"))
    built = {source.parent.name for source in sources if arches_of(source, arches)}
    common = [f"-DAMP_EXT_{name.upper()}" for name in ("sm80", "sm90") if name in built]
    common += [*common_flags(), "-Icsrc/kernels"]
    kernels = [*common, "-Xcompiler=-fPIC,-fvisibility=hidden", "-Xptxas=-v"]
    kernels += ["-lineinfo"] if env_flag("AMP_EXT_LINEINFO") else []
    for source in sources:
        # The updates' arithmetic is the same, to the bit, on every device.
        exact = ["-fmad=false"] if source.parent.name == "optim" else []
        if gencode := gencode_flags(arches_of(source, arches)):
            units.append((source, f"{source}.o", [*kernels, *exact, *gencode]))
    return units


# A library exports one symbol and lacks none. torch has loaded the CUDA runtime before.
LIBRARY_LINK_FLAGS = ["-Wl,--version-script=csrc/library.map", "-Wl,-z,defs"]


class Target(NamedTuple):
    """Describe a shared library. Its object files lie beside it."""

    path: Path
    units: list[Unit]
    link: list[str]


def ninja_file(targets: list[Target], nvcc: str | None) -> str:
    """Return a build.ninja for the targets. Builds for several versions of torch share its log."""

    def path(value: Path) -> str:
        return re.sub(r"([$ :])", r"$\1", str(value))

    def words(values: list[str]) -> str:
        return shlex.join(values).replace("$", "$$")

    cxx = os.environ.get("CXX") or "c++"
    nvcc = words([nvcc]) if nvcc else ""
    args = "$flags -MMD -MF $out.d -c $in -o $out"
    depfile = "\n  depfile = $out.d\n  deps = gcc\n  description = compile $in"
    lines = [
        "builddir = build",
        f"rule link\n  command = {cxx} -shared $in -o $out $flags\n  description = link $out",
        f"rule .cpp\n  command = {cxx} {args}{depfile}",
        # The log keeps what ptxas says about each kernel.
        f"rule .cu\n  command = {nvcc} {args} >$out.log 2>&1 || (cat $out.log; false){depfile}",
    ]
    # The CUDA library takes longest, and comes first.
    for target in sorted(targets, key=lambda target: target.path.name != CUDA_LIBRARY):
        objects = []
        for source, name, flags in target.units:
            objects.append(path(target.path.parent / name))
            lines.append(f"build {objects[-1]}: {source.suffix} {path(source)}")
            lines.append(f"  flags = {words(flags)}")
        link = f"build {path(target.path)}: link {' '.join(objects)}"
        lines.append(f"{link}\n  flags = {words(target.link)}")
    return "\n".join(lines) + "\n"


def make(targets: list[Target], nvcc: str | None = None) -> list[Path]:
    """Compile and link what has changed; raise CompileError for errors."""
    jobs = os.environ.get("MAX_JOBS")
    script = targets[0].path.with_name("build.ninja")
    script.parent.mkdir(parents=True, exist_ok=True)
    with open("build/.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        script.write_text(ninja_file(targets, nvcc))
        own = importlib.util.find_spec("ninja")  # another version would compile everything again
        ninja = [sys.executable, "-m", "ninja"] if own else ["ninja"]
        if subprocess.run([*ninja, "-f", script, *(["-j", jobs] if jobs else [])]).returncode:
            names = " and ".join(target.path.name for target in targets)
            raise CompileError(f"{names} did not compile: the compiler's errors are above")
    return [target.path for target in targets]


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
        require_compiler()
        import torch

        if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
            raise PlatformError(f"torch {torch.__version__} is too old: pip install '{TORCH}'")
        force_cpu, force_cuda = env_flag("FORCE_CPU"), env_flag("FORCE_CUDA")
        toolkit = find_toolkit() if torch.version.cuda and not force_cpu else None
        nvcc = toolkit and toolkit.version
        if not builds_kernels(force_cpu, force_cuda, nvcc, torch.version.cuda):
            toolkit = None

        cuda = torch.version.cuda if toolkit else None
        torch_dir = Path(torch.__file__).parent
        folders = cuda_folders(torch_dir, toolkit) if toolkit else []
        target = Path(self.get_ext_fullpath(ext.name))
        # Each Python and each torch finds its own objects again.
        python, kind = sysconfig.get_config_var("SOABI"), "cuda" if cuda else "cpu"
        folder = Path("build", f"{python}-torch{torch.__version__}-{kind}")
        units = module_units(torch_dir, folders)
        # No -fopenmp: the module uses the OpenMP runtime that torch has loaded.
        link = [f"-L{torch_dir}/lib", "-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
        if toolkit:
            link += ["-lc10_cuda", "-ltorch_cuda", cuda_runtime(folders)]
        targets = [Target(folder / target.name, units, link)]
        if toolkit:
            arches = parse_arch_list(os.environ.get("TORCH_CUDA_ARCH_LIST", ""), toolkit.arches)
            link = [*LIBRARY_LINK_FLAGS, cuda_runtime([toolkit.root])]
            path = Path("build", f"cuda{toolkit.version}", CUDA_LIBRARY)
            targets.append(Target(path, cuda_units(arches), link))
        targets.append(Target(Path("build/cpu", CPU_LIBRARY), cpu_units(), LIBRARY_LINK_FLAGS))
        files = make(targets, toolkit and toolkit.nvcc)

        self.mkpath(str(target.parent))
        install(files, target.parent)
        target.with_name("_build_info.py").write_text(
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
