"""Build the CUDA runtime without a GPU, and make the environment that preloads it.

The runtime replaces libcudart and the driver under torch's CUDA build. Kernels are the PTX of a
folder; torch's own operators run its CPU kernels.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

from cudasim import build

SOURCES = build.HERE / "runtime"
PRELOADED = ("capture", "devices", "launches", "memory", "streams")
CUDA = "nvidia/cu13"  # the folder of NVIDIA's packages
FLAGS = ("-O1", "-fvisibility=default")


def site_packages() -> Path:
    """Return the folder of torch and of NVIDIA's packages."""
    torch = find_spec("torch")
    assert torch and torch.origin
    return Path(torch.origin).parents[1]


def missing() -> str:
    """Return why nothing can run here; empty when it can."""
    if not find_spec("torch") or not (site_packages() / "torch/lib/libc10_cuda.so").is_file():
        return "torch is no CUDA build"
    if not (site_packages() / CUDA / "lib/libcudart.so.13").is_file():
        return "torch is no build for CUDA 13 with NVIDIA's packages beside it"
    return build.missing()


def architecture(capability: int) -> str:
    """Return the architecture of the PTX for devices of a capability, 90 for 9.0."""
    return {86: "80", 89: "80", 90: "90a"}.get(capability, str(capability))


def symbols(library: Path, kind: str, pattern: str) -> set[str]:
    """Return the functions that a library or an object defines (T) or needs (U)."""
    dynamic = ["-D"] if ".so" in library.name else []
    listed = subprocess.run(["nm", *dynamic, library], capture_output=True, text=True, check=True)
    return set(re.findall(rf" {kind} ({pattern})(?:@|$)", listed.stdout, re.MULTILINE))


def _lacking(objects: Iterable[Path]) -> str:
    """Return C++ that refuses each function of CUDA missing from the objects."""
    site = site_packages()
    wanted = symbols(site / CUDA / "lib/libcudart.so.13", "T", r"\w*[cC]uda\w+")
    wanted |= symbols(site / "torch/lib/libcaffe2_nvrtc.so", "U", r"cu[A-Z]\w+")
    looked_up = (site / "torch/lib/libc10_cuda.so").read_bytes()
    wanted |= {name.decode() for name in re.findall(rb"\0(cu[A-Z]\w+)(?=\0)", looked_up)}
    triton = site / "triton/backends/nvidia/driver.c"
    if triton.is_file():
        wanted |= set(re.findall(r"\b(cu[A-Z]\w+)\(", triton.read_text()))
    for path in objects:
        wanted -= symbols(path, "T", r"\w+")
    lines = ['extern "C" int fake_cuda_missing(const char*);']
    lines += [
        f'extern "C" int {name}() {{ return fake_cuda_missing("{name}"); }}'
        for name in sorted(wanted)
    ]
    return "\n".join(lines) + "\n"


def environment(ptx: Path | None) -> dict[str, str]:
    """Return the environment of Python without a GPU, with or without a folder of PTX."""
    site = site_packages()
    torch = site / "torch"
    headers = (build.toolkit_include(), site / CUDA / "include")  # cuBLAS's beside torch
    include = [f"-isystem{folder}" for folder in headers]
    version = re.search(r"^__version__ = '(.+)'", (torch / "version.py").read_text(), re.MULTILINE)
    assert version
    folders = (torch / "include", torch / "include/torch/csrc/api/include")
    of_torch = [*FLAGS, *(f"-isystem{folder}" for folder in folders), *include]
    of_torch.append(f'-DBUILT_FOR="{version[1]}"')  # another torch, another object
    with build.alone(build.BUILD / "cuda"):
        objects = build.compiled(
            [SOURCES / f"{name}.cpp" for name in PRELOADED], [*FLAGS, *include]
        )
        rest = build.BUILD / "cuda" / f"missing-{build.digest(*map(str, objects))}.cpp"
        if not rest.exists():
            rest.write_text(_lacking(objects))
        objects += build.compiled([rest], FLAGS)
        # torch looks for the driver under this name, and Triton links to it.
        runtime = build.linked("cuda", objects, ["-Wl,-soname,libcuda.so.1"])
        driver = build.BUILD / "cuda" / "driver" / "libcuda.so.1"
        driver.parent.mkdir(exist_ok=True)
        driver.unlink(missing_ok=True)
        driver.symlink_to(runtime)
        # A machine with a GPU has another number of devices, and other processes on them.
        nvml = build.linked(
            "nvml",
            build.compiled([SOURCES / "nvml.cpp"], FLAGS),
            ["-Wl,-soname,libnvidia-ml.so.1"],
        )
        fallback = build.linked(
            "fallback",
            build.compiled([SOURCES / "fallback.cpp"], of_torch),
            [f"-L{torch / 'lib'}", "-lc10", "-lc10_cuda", "-ltorch_cpu"],
        )
    found = {
        "LD_PRELOAD": f"{runtime}:{nvml}",
        "TRITON_LIBCUDA_PATH": str(driver.parent),
        "FAKE_CUDA_FALLBACK": str(fallback),
    }
    if ptx:
        found |= {"FAKE_CUDA_KERNELS": str(build.kernels()), "CUDASIM_PTX": str(ptx)}
    return found


def order(text: str) -> str:
    if not re.fullmatch(r"now|late|\d+", text):
        raise argparse.ArgumentTypeError(f"expected now, late or a seed, not {text}")
    return text


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe the devices."""
    parser.add_argument(
        "--order",
        type=order,
        default="late",
        help="when operations run: as they are issued (now), when the host waits for them (late) "
        "or at random by a seed",
    )
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument(
        "--capability",
        type=int,
        choices=(75, 80, 86, 89, 90, 100, 120),
        default=90,
        help="90 for 9.0",
    )
    parser.add_argument("--multiprocessors", type=int, default=4, help="of each device")
    parser.add_argument("--memory", type=int, default=8 << 30, help="bytes of each device")
    parser.add_argument(
        "--guarded",
        type=int,
        choices=(0, 1),
        default=0,
        help="1 to end the process where the host touches device memory; slower",
    )


def run(program: Sequence[str], variables: dict[str, str], settings: dict[str, object]) -> None:
    """Replace this process by a program on fake GPUs: pytest, a script, or Python with -m or -c.

    Each variable of environment() is prepended to the existing one. The settings are options of the
    fake GPUs, such as `devices`, `capability` and `order`.
    """
    os.environ.update({f"FAKE_CUDA_{name.upper()}": str(v) for name, v in settings.items()})
    plugins = {"PYTEST_PLUGINS": "cudasim.plugin", "PYTHONPATH": str(build.HERE.parent)}
    for name, value in (*variables.items(), *plugins.items()):
        separator = "," if name == "PYTEST_PLUGINS" else ":"
        os.environ[name] = separator.join(filter(None, [value, os.environ.get(name)]))
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # of a GPU that may be here
    python = ["-m", "pytest", *program[1:]] if program[0] == "pytest" else program
    if program[0] in ("python", "python3"):
        python = program[1:]
    os.execv(sys.executable, [sys.executable, *python])
