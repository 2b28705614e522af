"""Build the CUDA kernels with the executor, by the host's C++ compiler, as a shared library.

Objects and libraries are kept in build/simt under the hash of all that they depend on, so that
nothing is compiled twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "simt"
KERNELS = ROOT / "csrc" / "kernels"
API = ROOT / "csrc" / "include"
ENGINE = HERE / "engine"
INCLUDES = (ENGINE, API)

CXX = os.environ.get("CXX", "g++")
FLAGS = (
    "-std=c++20",
    "-g1",
    "-fPIC",
    "-fno-gnu-unique",  # several libraries in one process, each with variables of its own
    "-ffp-contract=off",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-sign-compare",
)
LINK_FLAGS = ("-shared", "-Wl,-z,defs", "-Wl,-Bsymbolic")  # no function of a CUDA runtime nearby

# Name -> (flags of kernels, flags of the engine, which is not instrumented, the runtime to preload)
FAST = ("-O3", "-march=native")
VARIANTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "plain": (("-Og",), FAST, ""),  # compiles in a third of the time of -O2
    "portable": (("-O2",), (*FAST, "-DSIMT_PORTABLE"), ""),
    "asan": (
        ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
        FAST,
        "libasan.so",
    ),
    "tsan": (("-O1", "-fsanitize=thread"), FAST, "libtsan.so"),
}


def _output(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a tool, without the sanitizer that may be preloaded here."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@cache
def cuda_include() -> Path | None:
    """Return the folder of NVIDIA's headers: the toolkit's, or that of the pip packages."""
    candidates = []
    if nvcc := shutil.which("nvcc"):
        dryrun = _output(nvcc, "--dryrun", "x.cu").stderr
        if top := re.search(r"^#\$ TOP=(.*)$", dryrun, re.MULTILINE):
            candidates.append(Path(top[1]) / "include")
    if home := os.environ.get("CUDA_HOME"):
        candidates.append(Path(home) / "include")
    if nvidia := importlib.util.find_spec("nvidia"):
        for folder in nvidia.submodule_search_locations or ():
            candidates.extend(sorted(Path(folder).glob("cu*/include"), reverse=True))
    return next((c for c in candidates if all(_parts(c).values())), None)


def _parts(include: Path) -> dict[str, bool]:
    """Return the pip packages that hold the needed headers, and whether they are there."""
    return {
        "nvidia-cuda-runtime": (include / "cuda_fp16.h").is_file(),
        "nvidia-cuda-crt": (include / "crt" / "host_defines.h").is_file(),
        "nvidia-cuda-cccl": any((p / "nv" / "target").is_file() for p in _folders(include)),
    }


def _folders(include: Path) -> tuple[Path, Path]:
    return include, include / "cccl"


def missing(variant: str = "plain") -> str:
    """Return why a variant cannot be built here; empty when it can."""
    if not shutil.which(CXX):
        return f"there is no C++ compiler {CXX}"
    if cuda_include() is None:
        return "NVIDIA's headers need a CUDA toolkit or the pip packages " + ", ".join(_parts(HERE))
    for runtime in filter(None, preload(variant).split(":")):
        if not Path(runtime).is_file():
            return f"{CXX} has no {runtime}"
    return ""


def preload(variant: str) -> str:
    """Return what LD_PRELOAD must be for a library of this variant; often nothing.

    A sanitizer finds the function that throws exceptions only in a library that is there before it.
    """
    name = VARIANTS[variant][2]
    names = (name, "libstdc++.so") if name else ()
    return ":".join(_output(CXX, f"-print-file-name={n}").stdout.strip() for n in names)


@cache
def _identity() -> list[str]:
    """Return the flags by which a library of backends says what it is, those of setup.py."""
    code = "import json, sys; sys.path.insert(0, sys.argv[1]); import setup as s; "
    code += "print(json.dumps(s.identity()))"
    return json.loads(_output(sys.executable, "-c", code, str(ROOT)).stdout)


@cache
def _compiler() -> str:
    """Return what tells compilers and, for -march=native, processors apart."""
    return _output(CXX, "-march=native", "-v", "-E", "-x", "c++", "/dev/null").stderr


def _included(source: Path, folders: Iterable[Path]) -> list[Path]:
    """Return a source and the headers that it includes, at whatever distance, without NVIDIA's."""
    found, left = [], [source]
    while left:
        if (path := left.pop()) in found:
            continue
        found.append(path)
        for bracket, name in re.findall(r'#\s*include (["<])([^">]+)[">]', path.read_text()):
            beside = [path.parent] if bracket == '"' else []
            places = (folder / name for folder in (*beside, *folders))
            left += [place for place in places if place.is_file()][:1]
    return found


def compile_object(source: Path, flags: Sequence[str], folders: Sequence[Path], into: Path) -> Path:
    """Return the object of a source, which may be one of the same text from another folder."""
    include = cuda_include()
    assert include, missing()
    includes = [flag for folder in folders for flag in ("-I", str(folder))]
    includes += [flag for folder in _folders(include) for flag in ("-isystem", str(folder))]
    identity = _identity() if source == HERE / "backend.cpp" else []
    command = [CXX, *FLAGS, *flags, *identity]
    digest = hashlib.sha256("\0".join([*command, str(include), _compiler()]).encode())
    for path in _included(source, folders):
        digest.update(path.name.encode() + path.read_bytes())
    name = f"{source.stem}-{digest.hexdigest()[:16]}.o"
    kept = BUILD / into.name / name
    if kept.exists():
        os.utime(kept)  # it is not old while it is used
        return kept
    if not (into / name).exists():
        remove_old(into, f"{source.stem}-*.o")
        run_compiler([*command, *includes, "-x", "c++", "-c", str(source)], into / name)
    return into / name


def remove_old(folder: Path, pattern: str) -> None:
    """Remove what was built more than a day ago; the rest may be in use by another process."""
    for old in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - old.stat().st_mtime > 24 * 3600:
                old.unlink()


def run_compiler(command: Sequence[str], result: Path) -> None:
    """Run a compiler that writes `result`, whole or not at all."""
    unfinished = result.with_suffix(f".{os.getpid()}.unfinished")
    done = _output(*command, "-o", str(unfinished))
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    os.replace(unfinished, result)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Let one process at a time build in a folder: another finds what it would have built too."""
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def all_sources(kernels: Path = KERNELS) -> list[Path]:
    """Return the kernels and their launchers for Python."""
    return [*sorted(kernels.rglob("*.cu")), *sorted(HERE.glob("*.cpp"))]


# Of the GEMM kernels' tests with a tile in their ids, those that few_sources() has kernels for.
FEW_TILES = "(128x64x32 or 64x64x64 or 16x128x64 or 64x64x32)"
FEW_SM90_TILES = "(sm90-128x256 or sm90-128x128)"


def few_sources(kernels: Path = KERNELS) -> list[Path]:
    """Return the same with a few instances of the GEMM kernels, which compile in a moment."""
    few = [path for path in all_sources(kernels) if not path.stem.endswith("f16")]
    return [*few, *sorted((HERE / "mutants" / "few").glob("*.cu"))]


def build(
    variant: str = "plain",
    name: str = "ops",
    sources: Sequence[Path] | None = None,
    kernels: Path = KERNELS,
    into: Path = BUILD,
) -> Path:
    """Return a shared library of the executor and `sources`.

    Args:
        variant: a key of VARIANTS.
        name: the library's.
        sources: all_sources(kernels) when None.
        kernels: the folder of the kernels.
        into: where objects and library are kept.
    """
    kernel_flags, engine_flags, _ = VARIANTS[variant]
    built = [name for name in ("sm80", "sm90") if any(kernels.glob(f"**/{name}/*.cu"))]
    kernel_flags += tuple(f"-DAMP_EXT_{name.upper()}" for name in built)  # as setup.py
    if sources is None:
        sources = all_sources(kernels)
    kept, made = BUILD / variant, into / variant
    kept.mkdir(parents=True, exist_ok=True)
    made.mkdir(parents=True, exist_ok=True)
    jobs = int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))
    with alone(made), ThreadPoolExecutor(jobs) as pool:
        engine = [
            pool.submit(compile_object, source, engine_flags, INCLUDES, kept)
            for source in sorted(ENGINE.glob("*.cpp"))
        ]
        rest = [
            pool.submit(compile_object, source, kernel_flags, [*INCLUDES, kernels], made)
            for source in sources
        ]
        objects = [str(job.result()) for job in (*engine, *rest)]
        digest = hashlib.sha256("\0".join(Path(o).name for o in objects).encode()).hexdigest()[:16]
        library = made / f"{name}-{digest}.so"
        if not library.exists():
            remove_old(made, f"{name}-*.so")
            run_compiler([CXX, *LINK_FLAGS, *kernel_flags, *objects], library)
    return library
