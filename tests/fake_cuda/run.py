"""Run Python on the CUDA runtime without a GPU, with the kernels of amp_ext.

    python tests/fake_cuda/run.py [--order now|late|SEED] [...] SCRIPT.py|-m MODULE|-c CODE ...
    python tests/fake_cuda/run.py -m pytest -n 2 tests/lists

The Python needs a CUDA build of torch, and amp_ext built by nvcc.
"""

import argparse
import json
import os
import re
import shlex
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from cudasim import build, cuda

ROOT = Path(__file__).resolve().parents[2]


def units(architecture: str) -> list[tuple[Path, list[str]]]:
    """Return the kernels with the flags of the build, and the probes; what takes long is first."""
    builds = sorted(ROOT.glob("build/cuda[0-9]*"), key=lambda path: path.stat().st_mtime)
    if not builds:
        sys.exit("the kernels have not been built here: pip install .")
    kernels = []
    for entry in json.loads((builds[-1] / "compile_commands.json").read_text()):
        if f"arch=compute_{architecture}," in entry["command"]:
            words = shlex.split(entry["command"])
            flags = [word for word in words if re.match("-[DI]|-std|-fmad", word)]
            kernels.append((Path(entry["file"]), flags))
    if not kernels:
        sys.exit(f"{builds[-1]} has no kernels for {architecture}")
    if architecture == "90a":
        folders = [f"-I{ROOT}/csrc/{name}" for name in ("include", "kernels")]
        kernels.append((ROOT / "tests/probe/probes.cu", ["-std=c++20", *folders]))
    return sorted(kernels, key=lambda unit: "f16" not in unit[0].name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    cuda.add_settings(parser)
    options, program = parser.parse_known_args()
    if reason := cuda.missing():
        sys.exit(f"the fake CUDA runtime cannot run here: {reason}")
    architecture = cuda.architecture(options.capability)
    ptx = build.ptx(units(architecture), architecture, ROOT / "build" / "ptx")
    variables = cuda.environment(ptx)
    variables["PYTEST_PLUGINS"] = "fake_cuda.plugin"
    os.environ.setdefault("AMP_EXT_GEMM", "kernel")
    cuda.run(program, variables, vars(options))


main()
