"""Build the kernels of amp_ext for the CUDA runtime without a GPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from cudasim import build, cuda
from simt import build as simt

ROOT = Path(__file__).resolve().parents[2]


def _units(architecture: str) -> list[tuple[Path, list[str]]]:
    """Return the kernels and their flags, those of setup.py."""
    name = re.sub(r"(\d)(a?)$", r".\1\2", architecture)
    code = "import json, sys; sys.path.insert(0, '.'); import setup as s; print(json.dumps("
    code += f"[(str(u[0]), u[2]) for u in s.cuda_units(['{name}']) if u[0].suffix == '.cu']))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)

    def kept(flags: list[str]) -> list[str]:
        left_out = ("-gencode", "-Xcompiler", "-Xptxas", "-lineinfo")
        own = [flag for flag in flags if not flag.startswith(left_out)]
        return [flag.replace("-Icsrc", f"-I{ROOT}/csrc") for flag in own]

    return [(ROOT / source, kept(flags)) for source, flags in json.loads(done.stdout)]


def ptx(capability: int) -> Path:
    """Return a folder with what nvcc makes of csrc/kernels for devices of a capability."""
    architecture = cuda.architecture(capability)
    return build.ptx(_units(architecture), architecture, build.BUILD / "kernels")


def simt_kernels() -> Path:
    """Return a library of the sources, recompiled for the host."""
    sources = [*sorted(simt.KERNELS.rglob("*.cu")), cuda.SOURCES / "kernels.cpp"]
    return simt.build("plain", "kernels", sources)
