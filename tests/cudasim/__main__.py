"""Run Python, or pytest, on CUDA kernels without a GPU.

    python -m cudasim --sources kernels.cu --capability 90 --devices 2 --order late -- pytest tests
    python -m cudasim --ptx FOLDER -- python train.py

The Python needs a torch built for CUDA 13.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path

from cudasim import build, cuda


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


def main() -> None:
    parser = argparse.ArgumentParser("python -m cudasim", description=__doc__.splitlines()[0])
    add_settings(parser)
    parser.add_argument(
        "--sources", type=Path, nargs="+", default=[], help="of kernels; nvcc makes PTX of them"
    )
    parser.add_argument("--flags", default="-O3", help="of nvcc, for the sources")
    parser.add_argument("--ptx", type=Path, help="a folder of PTX, instead of sources")
    parser.add_argument("program", nargs="+", help="behind --: pytest, a script, -m or -c")
    settings = vars(parser.parse_args())
    sources, flags, ptx = (settings.pop(name) for name in ("sources", "flags", "ptx"))
    program = settings.pop("program")
    if reason := cuda.missing():
        sys.exit(f"cudasim cannot run here: {reason}")
    if not ptx:
        units = [(source.resolve(), shlex.split(flags)) for source in sources]
        into = build.BUILD / f"ptx-{build.digest(*(str(source) for source, _ in units))}"
        ptx = build.ptx(units, cuda.architecture(settings["capability"]), into)
    cuda.run(program, cuda.environment(ptx.resolve()), settings)


if __name__ == "__main__":
    main()
