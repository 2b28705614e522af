"""Run Python on the CUDA runtime without a GPU, with the kernels of amp_ext.

    python tests/fake_cuda/run.py [--order now|late|SEED] [...] SCRIPT.py|-m MODULE|-c CODE ...
    python tests/fake_cuda/run.py -m pytest -n 2 tests/lists

The Python needs a CUDA build of torch, and amp_ext built by nvcc. The options are the same as of
python -m cudasim for the kernels of other extensions.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from cudasim import cuda
from cudasim.__main__ import add_settings
from ptx_backend import build


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add_settings(parser)
    options, program = parser.parse_known_args()
    if reason := cuda.missing():
        sys.exit(f"the fake CUDA runtime cannot run here: {reason}")
    variables = cuda.environment(build.ptx(cuda.architecture(options.capability)))
    variables["PYTEST_PLUGINS"] = "fake_cuda.plugin"
    os.environ.setdefault("AMP_EXT_GEMM", "kernel")
    cuda.run(program, variables, vars(options))


main()
