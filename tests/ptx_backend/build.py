"""Build csrc/kernels for the executor of PTX, by nvcc: PTX, and a library of the launchers.

Both are kept in build/ptx, and compiled again where something that they depend on has changed.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from cudasim import build as cudasim

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CSRC = ROOT / "csrc"
BUILD = ROOT / "build" / "ptx"
RUNTIME = cudasim.HERE / "runtime"
HOST_FLAGS = ("-std=c++20", "-O1", "-Xcompiler=-fPIC")
EXPORTED = "{ global: amp_ext_backend_library; ptx_*; probe_*; local: *; };"


class Unit(NamedTuple):
    """A source and its flags for nvcc."""

    source: Path
    flags: Sequence[str]


def missing() -> str:
    """Return why nothing can be built here; empty when it can."""
    return cudasim.missing()


@functools.cache
def _setup(expression: str) -> list:
    """Return the value of an expression with setup.py as s."""
    code = "import json, sys; sys.path.insert(0, '.'); import setup as s; "
    code += f"print(json.dumps({expression}))"
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def units(architecture: str) -> list[Unit]:
    """Return the kernels and the flags of setup.py."""
    name = re.sub(r"(\d)(a?)$", r".\1\2", architecture)
    found = []
    for source, _, flags in _setup(f"[(str(u[0]), *u[1:]) for u in s.cuda_units(['{name}'])]"):
        if source.endswith(".cu"):
            kept = [f for f in flags if not f.startswith(("-gencode", "-Xptxas", "-lineinfo"))]
            found.append(Unit(ROOT / source, [f.replace("-Icsrc", f"-I{CSRC}") for f in kept]))
    return found


@functools.cache
def _nvcc() -> str:
    return subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout


def compile(unit: Unit, architecture: str, into: Path) -> Path:
    """Return the object of a source; its PTX, where it has kernels, is beside it."""
    made = into / f"{unit.source.parent.name}_{unit.source.stem}.o"
    record, depends = made.with_suffix(".key"), made.with_suffix(".d")
    code = f"-gencode=arch=compute_{architecture},code=compute_{architecture}"
    command = ["nvcc", *unit.flags, code, "-lineinfo", "-MD", "-c", str(unit.source)]
    if not made.exists() or record.read_text() != cudasim.key(_nvcc(), command, depends):
        with TemporaryDirectory(dir=into) as kept:
            unfinished = Path(kept) / "whole.o"
            files = [f"-keep-dir={kept}", "-MF", str(depends), "-o", str(unfinished)]
            cudasim.call([*command, "-keep", *files])
            if unit.source.suffix == ".cu":
                (Path(kept) / f"{unit.source.stem}.ptx").replace(made.with_suffix(".ptx"))
            unfinished.replace(made)
        record.write_text(cudasim.key(_nvcc(), command, depends))
    return made


def compile_all(sources: Sequence[Unit], architecture: str, folder: Path) -> list[Path]:
    """Return the objects of the kernels; a folder has these, and their PTX, and no others."""
    with cudasim.alone(folder), ThreadPoolExecutor(cudasim.jobs()) as pool:
        longest_first = sorted(sources, key=lambda unit: "f16" not in unit.source.name)
        made = list(pool.map(lambda unit: compile(unit, architecture, folder), longest_first))
        for old in set(folder.glob("*.o")) - set(made):
            old.unlink()
            old.with_suffix(".ptx").unlink(missing_ok=True)
    return sorted(made)


def link(
    name: str,
    objects: Sequence[Path],
    architecture: str,
    folder: Path,
    sources: Sequence[Path] = (),
) -> Path:
    """Return a library, in the folder of the kernels' PTX, of objects, the CUDA runtime over the
    executor, and other sources of the host."""
    host = BUILD / "host" / architecture
    includes = (CSRC / "include", CSRC / "kernels", HERE, HERE.parent / "cudasim/ptx", RUNTIME)
    capability = re.sub(r"\D", "", architecture)
    defined = [f"-DPTX_CAPABILITY={capability}", *_setup("s.identity()")]
    flags = [*HOST_FLAGS, *defined, *(f"-I{path}" for path in includes)]
    with cudasim.alone(host), ThreadPoolExecutor(cudasim.jobs()) as pool:
        own = [Unit(source, flags) for source in (HERE / "runtime.cpp", *sources)]
        whole = [*objects, *pool.map(lambda unit: compile(unit, architecture, host), own)]
        built = cudasim.kernels()
        executor = folder / built.name  # a copy, with PTX of its own
        if not executor.exists():
            shutil.copy(built, executor)
        keys = [path.with_suffix(".key").read_text() for path in whole]
        made = folder / f"{name}-{cudasim.digest(*keys, built.name)}.so"
        if not made.exists():
            exported = folder / "exported.map"
            exported.write_text(EXPORTED)
            symbols = [f"-Wl,--version-script={exported}", "-Wl,-z,defs"]
            parts = [str(path) for path in (*whole, executor)]
            cudasim.run([cudasim.CXX, "-shared", *symbols, *parts], made)
    return made


def kernels(architecture: str) -> Path:
    """Return the library of the backend ptx."""
    folder = BUILD / architecture
    objects = compile_all(units(architecture), architecture, folder)
    return link("ops", objects, architecture, folder, BACKEND)


BACKEND = (HERE / "backend.cpp",)


def ptx(architecture: str) -> Path:
    """Return a folder with the PTX of all kernels."""
    folder = BUILD / architecture
    compile_all(units(architecture), architecture, folder)
    return folder


def edited(architecture: str, folder: Path, edits: Mapping[str, tuple[str, str]]) -> Path:
    """Return the library of edited PTX, in an empty folder, to break kernels.

    Edits are a regular expression and its replacement, by the names of files of PTX.
    """
    for path in ptx(architecture).glob("*_*.*"):
        if path.suffix in (".o", ".key", ".ptx"):
            shutil.copy(path, folder)
    for name, (pattern, replacement) in edits.items():
        path = folder / f"{name}.ptx"
        text, count = re.subn(pattern, replacement, path.read_text(), flags=re.MULTILINE)
        assert count, f"{name}: nothing matches {pattern}"
        path.write_text(text)
    return link("ops", sorted(folder.glob("*.o")), architecture, folder, BACKEND)
