"""Run every op on small inputs, under compute-sanitizer by `make gpu`.

python tests/support/small_case.py [--device cuda]
"""

import argparse
import os
import sys

# An allocation of its own for each tensor: memcheck sees nothing within torch's cache.
if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch

from amp_ext import verify


def small_case(device: torch.device) -> None:
    """Compare the cases that verify ops on lists, and products of FP16."""
    for family in set(verify.families(device.type, device)) - {"gemm_bf16"}:
        for case in verify.cases(family, device.type, device):
            verify.compare(case, device)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    small_case(torch.device(parser.parse_args().device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
