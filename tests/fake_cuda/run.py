"""Run Python on the fake CUDA runtime, in the place of torch's.

    python tests/fake_cuda/run.py [--order now|late|SEED] [...] SCRIPT.py|-m MODULE|-c CODE ...
    python tests/fake_cuda/run.py -m pytest -n 2 tests/lists

The Python is one of which torch is a CUDA build and amp_ext was built by nvcc.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from fake_cuda import build

TESTS = Path(__file__).resolve().parents[1]


def arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--order",
        default="late",
        help="when operations run: as they are issued (now), when the host waits for them (late) "
        "or at random by a seed",
    )
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--capability", type=int, default=90, help="90 for 9.0")
    parser.add_argument("--multiprocessors", type=int, default=4, help="of each device")
    parser.add_argument("--memory", type=int, default=8 << 30, help="bytes of each device")
    parser.add_argument(
        "--guarded",
        type=int,
        choices=(0, 1),
        default=0,
        help="1 to end the process where the host touches device memory; slower",
    )
    return parser.parse_known_args()


def main() -> None:
    options, python = arguments()
    if reason := build.missing():
        sys.exit(f"the fake CUDA runtime cannot run here: {reason}")
    os.environ.update(
        {f"FAKE_CUDA_{name.upper()}": str(value) for name, value in vars(options).items()}
    )
    os.environ.update(build.build())
    os.environ.setdefault("AMP_EXT_GEMM", "kernel")
    os.environ["PYTEST_PLUGINS"] = "fake_cuda.plugin"
    folders = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    os.execv(sys.executable, [sys.executable, *python])


main()
