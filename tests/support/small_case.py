"""Run every op on small inputs, under compute-sanitizer by `make gpu`.

python tests/support/small_case.py [--device cuda]
"""

from __future__ import annotations

import argparse
import os
import sys

# An allocation of its own for each tensor: memcheck sees nothing within torch's cache.
if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch

from amp_ext import _C, ops, verify
from amp_ext.ops.gemm import product_cases


def small_case(device: torch.device) -> None:
    """The cases that verify the ops on lists, and products of fp16."""
    is_sm90 = device.type == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    cases = [case for name in ops.LIST_OPS for case in getattr(ops, name).cases()]
    for case in (*cases, *product_cases(torch.float16, device.type, is_sm90)):
        verify.compare(case, device)
    _C.force_gemm_tile(None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    _C.set_gemm_mode("kernel")
    small_case(torch.device(parser.parse_args().device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
