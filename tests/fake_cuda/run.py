"""Run Python on the fake CUDA runtime, in the place of torch's.

    python tests/fake_cuda/run.py [--order now|late|SEED] [...] SCRIPT.py|-m MODULE|-c CODE ...
    python tests/fake_cuda/run.py -m pytest -n 2 tests/lists

The Python is one of which torch is a CUDA build and amp_ext was built by nvcc.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from fake_cuda import build

TESTS = Path(__file__).resolve().parents[1]


def order(text: str) -> str:
    if not re.fullmatch(r"now|late|\d+", text):
        raise argparse.ArgumentTypeError(f"expected now, late or a seed, not {text}")
    return text


def arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
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
    return parser.parse_known_args()


def main() -> None:
    options, python = arguments()
    if reason := build.missing():
        sys.exit(f"the fake CUDA runtime cannot run here: {reason}")
    os.environ.update(
        {f"FAKE_CUDA_{name.upper()}": str(value) for name, value in vars(options).items()}
    )
    environment = build.build(options.capability)
    more = {**environment, "PYTEST_PLUGINS": "fake_cuda.plugin", "PYTHONPATH": str(TESTS)}
    for name, value in more.items():
        separator = "," if name == "PYTEST_PLUGINS" else ":"
        os.environ[name] = separator.join(filter(None, [value, os.environ.get(name)]))
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # of a GPU that may be here
    os.environ.setdefault("AMP_EXT_GEMM", "kernel")
    os.execv(sys.executable, [sys.executable, *python])


main()
