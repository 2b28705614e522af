"""Test the GEMM kernel for sm_90a on a GPU: every tile, the same bits in every run."""

import itertools

import pytest
import torch

import reference
from amp_ext import _C
from amp_ext.ops.gemm import Plan
from cases import assert_equal, integers
from planner import gemm_tiles

CUTS = ((8200, 4104, 200, 1), (264, 520, 2056, 4), (520, 776, 2056, 3))
RUNS = 200
FP16, FP32 = torch.float16, torch.float32
DEVICE = torch.device("cuda")
is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.skipif(not is_hopper, reason="torch sees no Hopper GPU"),
    pytest.mark.parametrize("tile", range(len(gemm_tiles(sm90=True)))),
]


def plan(tile: int, splits: int = 1) -> Plan:
    return Plan("cuda", _C.gemm_variant(tile, splits, sm90=True))


def test_every_tile_cuda(tile: int) -> None:
    """Products of integers are exact: several tiles a block, tails, splits, every layout."""
    for dtype, out_dtype in ((FP16, FP32), (torch.bfloat16, torch.bfloat16)):
        for trans_a, trans_b in itertools.product((False, True), repeat=2):
            for m, n, k, splits in CUTS:
                a = integers((k, m) if trans_a else (m, k), dtype, DEVICE)
                b = integers((n, k) if trans_b else (k, n), dtype, DEVICE)
                options = {"trans_a": trans_a, "trans_b": trans_b, "out_dtype": out_dtype}
                result = plan(tile, splits).gemm(a, b, **options)
                assert_equal(result, reference.gemm(a, b, **options))


def test_accumulation_cuda(tile: int) -> None:
    """The memory system adds the product to its result."""
    a, b = integers((1032, 520), FP16, DEVICE), integers((1032, 776), FP16, DEVICE)
    expected = integers((520, 776), FP32, DEVICE)
    c = expected.clone()
    for _ in range(2):
        plan(tile).gemm_accumulate_(c, a, b, trans_a=True)
        expected = expected + (a.double().T @ b.double()).float()
        assert_equal(c, expected.double())


@pytest.mark.parametrize("splits", [1, 2, 4])
def test_runs_are_the_same_cuda(tile: int, splits: int) -> None:
    a = torch.randn(1288, 4104, device=DEVICE, dtype=FP16)
    b = torch.randn(1032, 4104, device=DEVICE, dtype=FP16)
    options = {"trans_b": True, "out_dtype": FP32}
    first = plan(tile, splits).gemm(a, b, **options)
    for _ in range(RUNS):
        assert torch.equal(plan(tile, splits).gemm(a, b, **options), first)
