"""Break the compiled CUDA kernels by rule; the small calls of cases.py must fail each time.

    python fake_cuda/run.py --capability 80 mutants/run.py [--most N] [--seed N] ...

The script prints the survivors, and a line for each kernel. The exit status is 1 when something
survives.
"""

import argparse
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # forks have no other threads
os.environ["AMP_EXT_VERIFY"] = "0"
os.environ["AMP_EXT_GEMM"] = "kernel"
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # each tensor's bounds are its own
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))

import torch

from cudasim.mutants import Equivalent, Kernels, hunt
from mutants.cases import cases

ENTRY = re.compile(r"^  (.+) \| (\w+) \| (.+)\n(?:    (.+)\n)?", re.MULTILINE)


def equivalents() -> Iterator[Equivalent]:
    """Read equivalent.txt."""
    for block in Path(__file__).with_name("equivalent.txt").read_text().split("\n\n"):
        reason, _, rows = block.partition("\n")
        for kernel, rule, statement, source in ENTRY.findall(f"{rows}\n"):
            source = source.replace(r"\n", "\n")
            yield Equivalent(kernel, source, "" if rule == "any" else rule, statement, reason)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=60, help="mutants of each kernel's template")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=int(os.environ.get("MAX_JOBS", 2)))
    parser.add_argument("--only", default="", help="part of the names of cases")
    parser.add_argument("--verbose", action="store_true", help="print what is caught too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.cuda._is_in_bad_fork = lambda: False  # true of a GPU
    major, minor = torch.cuda.get_device_capability()
    chosen = [case for case in cases(10 * major + minor) if options.only in case.name]
    kernels = Kernels(os.environ["FAKE_CUDA_KERNELS"])
    how = {name: getattr(options, name) for name in ("most", "seed", "jobs", "verbose")}
    survivors = hunt(kernels, chosen, tuple(equivalents()), **how)
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
