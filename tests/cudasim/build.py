"""Build the executor by the host's C++ compiler, and PTX by nvcc.

Both are kept in build/cudasim under the hash of all that they depend on.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "cudasim"
CXX = os.environ.get("CXX", "g++")
# -frounding-math: instructions have rounding modes; -fwrapv: PTX's whole numbers wrap.
FLAGS = [
    "-std=c++20",
    "-O2",
    "-g1",
    "-march=native",
    "-ffp-contract=off",
    "-frounding-math",
    "-fwrapv",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
]


def jobs() -> int:
    return int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))


def missing() -> str:
    """Return why nothing can be built here; empty when it can."""
    absent = [tool for tool in (CXX, "nvcc") if not shutil.which(tool)]
    return f"there is no {' and no '.join(absent)}" if absent else ""


def digest(*parts: str | bytes) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part.encode() if isinstance(part, str) else part)
        whole.update(b"\0")
    return whole.hexdigest()[:16]


def call(command: Sequence[str], folder: str | Path = ".") -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def run(command: Sequence[str], result: Path) -> None:
    """Run a compiler that writes `result`, whole or not at all."""
    unfinished = result.with_suffix(f".{os.getpid()}.unfinished")
    call([*command, "-o", str(unfinished)])
    os.replace(unfinished, result)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Let one process at a time build in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _version(*command: str) -> str:
    """Return the output of a compiler's version, including the processor of -march=native."""
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout + done.stderr


@functools.cache
def toolkit_include() -> Path:
    """Return the folder of the toolkit's headers."""
    dryrun = subprocess.run(["nvcc", "--dryrun", "x.cu"], capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.*)$", dryrun, re.MULTILINE)
    assert top
    return Path(top[1]) / "include"


def compiled(sources: Sequence[Path], flags: Sequence[str] = ()) -> list[Path]:
    """Return the objects of C++ sources; compile missing ones."""
    compiler = _version(CXX, "-march=native", "-v", "-E", "-x", "c++", "/dev/null")
    folders = {HERE / "ptx", *(source.parent for source in sources)}
    headers = [path.read_bytes() for folder in folders for path in folder.rglob("*.h")]
    command = [CXX, *FLAGS, f"-I{HERE / 'ptx'}", *flags, "-c"]
    key = digest(compiler, *command, *sorted(headers))
    into = BUILD / "objects"

    def compile_one(source: Path) -> Path:
        made = into / f"{source.stem}-{digest(key, source.read_bytes())}.o"
        if not made.exists():
            run([*command, str(source)], made)
        return made

    with alone(into), ThreadPoolExecutor(jobs()) as pool:
        return list(pool.map(compile_one, sources))


def linked(name: str, objects: Iterable[Path], flags: Sequence[str] = ()) -> Path:
    """Return a shared library of objects."""
    names = [str(path) for path in objects]
    made = BUILD / "objects" / f"{name}-{digest(*names, *flags)}.so"
    with alone(BUILD / "objects"):
        if not made.exists():
            run([CXX, "-shared", *names, *flags], made)
    return made


def kernels() -> Path:
    """Return the executor, which is also the library of kernels of a CUDA runtime."""
    runtime = HERE / "runtime"
    flags = [f"-I{runtime}", f"-isystem{toolkit_include()}"]
    objects = compiled(sorted((HERE / "ptx").rglob("*.cpp")))
    objects += compiled([runtime / "kernels.cpp"], flags)
    return linked("cudasim", objects, ["-Wl,-z,defs"])


def ptx(units: Iterable[tuple[Path, Sequence[str]]], architecture: str, into: Path) -> Path:
    """Return a folder with the PTX of sources with their flags, for "80" or "90a".

    It lies in `into`. Only sources that have changed are compiled.
    """
    folder = into / architecture
    compiler = _version("nvcc", "--version")

    def compiled(unit: tuple[Path, Sequence[str]]) -> Path:
        source, flags = unit
        name = f"{source.parent.name}_{source.stem}"
        made, record = folder / f"{name}.ptx", folder / f"{name}.key"
        depends = folder / f"{name}.d"
        command = ["nvcc", "-ptx", f"-arch=compute_{architecture}", "-lineinfo", *flags]
        command += ["-MD", "-MF", str(depends), str(source)]
        if not made.exists() or record.read_text() != key(compiler, command, depends):
            run(command, made)
            record.write_text(key(compiler, command, depends))
        return made

    with alone(folder), ThreadPoolExecutor(jobs()) as pool:
        current = set(pool.map(compiled, units))
        for old in set(folder.glob("*.ptx")) - current:
            old.unlink()
    return folder


def key(compiler: str, command: Sequence[str], depends: Path) -> str:
    """Return the hash of a compiler, a command and the files that it read."""
    files = depends.read_text().split(":", 1)[1].replace("\\\n", " ").split()
    own = [Path(file) for file in files if "/targets/" not in file and "/usr/" not in file]
    contents = [path.read_bytes() if path.exists() else b"" for path in own]
    return digest(compiler, *command, *contents)
