"""Build the fake CUDA runtime: what is preloaded, the kernels, and torch's operators.

Objects and libraries are kept under the hash of all that they depend on.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from cudasim import build as cudasim
from ptx_backend import build as kernels

SOURCES = Path(__file__).resolve().parent / "runtime"
RUNTIME = ("capture", "devices", "driver", "launches", "memory", "streams")
CUDA = "nvidia/cu13"  # the folder of NVIDIA's packages
FLAGS = ("-O1",)


def site_packages() -> Path:
    """Return the folder of torch and of NVIDIA's packages."""
    torch = find_spec("torch")
    assert torch and torch.origin
    return Path(torch.origin).parents[1]


def missing() -> str:
    """Return why it cannot be built here; empty if it can."""
    if not (site_packages() / "torch" / "lib" / "libc10_cuda.so").is_file():
        return "torch is no CUDA build"
    if not (site_packages() / CUDA / "lib/libcudart.so.13").is_file():
        return "torch is no build for CUDA 13 with NVIDIA's packages beside it"
    return cudasim.missing()


def symbols(library: Path, kind: str, pattern: str) -> set[str]:
    """Return the functions that a library or an object defines (T) or needs (U)."""
    dynamic = ["-D"] if ".so" in library.name else []
    listed = subprocess.run(["nm", *dynamic, library], capture_output=True, text=True, check=True)
    return set(re.findall(rf" {kind} ({pattern})(?:@|$)", listed.stdout, re.MULTILINE))


def _link(name: str, objects: Iterable[Path], into: Path, *flags: str) -> Path:
    names = [str(path) for path in objects]
    library = into / f"{name}-{cudasim.digest(*names, *flags)}.so"
    if not library.exists():
        cudasim.run([cudasim.CXX, "-shared", *names, *flags], library)
    return library


def _object(source: Path, flags: Iterable[str], into: Path) -> Path:
    """Return the object of a source of the runtime."""
    headers = (*SOURCES.glob("*.h"), *(cudasim.HERE / "ptx").glob("*.h"))
    toolkit = f"-isystem{kernels.toolkit_include()}"
    command = [cudasim.CXX, "-std=c++20", "-g1", "-fPIC", *flags, toolkit]
    texts = (path.read_bytes() for path in (source, *sorted(headers)))
    made = into / f"{source.stem}-{cudasim.digest(*command, *texts)}.o"
    if not made.exists():
        cudasim.run([*command, "-c", str(source)], made)
    return made


def _build_runtime(objects: list[Path], into: Path) -> Path:
    """Link it, with an error for each function of CUDA that it does not have."""
    site = site_packages()
    wanted = symbols(site / CUDA / "lib/libcudart.so.13", "T", r"\w*[cC]uda\w+")
    wanted |= symbols(site / "torch/lib/libcaffe2_nvrtc.so", "U", r"cu[A-Z]\w+")
    looked_up = (site / "torch/lib/libc10_cuda.so").read_bytes()
    wanted |= {name.decode() for name in re.findall(rb"\0(cu[A-Z]\w+)(?=\0)", looked_up)}
    triton = site / "triton/backends/nvidia/driver.c"
    wanted |= set(re.findall(r"\b(cu[A-Z]\w+)\(", triton.read_text()))
    for path in objects:
        wanted -= symbols(path, "T", r"\w+")
    lines = ['extern "C" int fake_cuda_missing(const char*);']
    lines += [
        f'extern "C" int {name}() {{ return fake_cuda_missing("{name}"); }}'
        for name in sorted(wanted)
    ]
    rest = into / "missing.cpp"
    rest.write_text("\n".join(lines) + "\n")
    # torch looks for the driver under this name, and Triton links to it.
    objects = [*objects, _object(rest, FLAGS, into)]
    library = _link("runtime", objects, into, "-Wl,-soname,libcuda.so.1")
    driver = into / "driver" / "libcuda.so.1"
    driver.parent.mkdir(exist_ok=True)
    driver.unlink(missing_ok=True)
    driver.symlink_to(library)
    return library


def build_ptx(capability: int) -> dict[str, str]:
    """Return the environment in which kernels are their compiled PTX, run by tests/cudasim."""
    architecture = {86: "80", 89: "80", 90: "90a"}.get(capability, str(capability))
    library = cudasim.library("runtime", [cudasim.HERE / "runtime.cpp"], kernels.runtime_flags())
    return {"FAKE_CUDA_KERNELS": str(library), "CUDASIM_PTX": str(kernels.ptx(architecture))}


def build(capability: int = 90) -> dict[str, str]:
    """Return the environment in which Python runs on the fake CUDA runtime, without what is in it
    already.

    Args:
        capability: of the devices, 90 for 9.0.
    """
    torch = site_packages() / "torch"
    version = re.search(r"^__version__ = '(.+)'", (torch / "version.py").read_text(), re.MULTILINE)
    assert version
    into = cudasim.BUILD.parent / f"fake_cuda-torch{version[1]}"
    headers = ("torch/include", "torch/include/torch/csrc/api/include", f"{CUDA}/include")
    of_torch = [f"-isystem{site_packages() / folder}" for folder in headers]
    with cudasim.alone(into), ThreadPoolExecutor(2) as pool:
        fallback = pool.submit(_object, SOURCES / "fallback.cpp", [*FLAGS, *of_torch], into)
        fresh = f"-I{cudasim.HERE / 'ptx'}"
        with_cublas = (*FLAGS, fresh, f"-isystem{site_packages() / CUDA / 'include'}")
        runtime = [
            pool.submit(_object, SOURCES / f"{name}.cpp", with_cublas, into) for name in RUNTIME
        ]
        # A machine with a GPU has another number of devices, and other processes on them.
        nvml = _object(SOURCES / "nvml.cpp", FLAGS, into)
        preloaded = (
            _build_runtime([job.result() for job in runtime], into),
            _link("nvml", [nvml], into, "-Wl,-soname,libnvidia-ml.so.1"),
        )
        paths = {
            "LD_PRELOAD": ":".join(map(str, preloaded)),
            "TRITON_LIBCUDA_PATH": str(into / "driver"),
            "FAKE_CUDA_FALLBACK": _link(
                "fallback",
                [fallback.result()],
                into,
                *(f"-L{torch / 'lib'}", "-lc10", "-lc10_cuda", "-ltorch_cpu"),
            ),
        }
    return {name: str(path) for name, path in paths.items()} | build_ptx(capability)
