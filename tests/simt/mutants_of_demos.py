"""Mutants of tests/simt/kernels/block_sum.cu. The other demonstration kernels are GEMMs, of which
csrc/kernels has better ones, with mutants."""

from __future__ import annotations

from simt.mutant import Mutant


def _mutant(name: str, old: str, new: str, variant: str = "plain") -> Mutant:
    select = "block_sum and not sanitizer and not 50_ms"
    return Mutant(name, "block_sum.cu", old, new, "simt_kernels", select, variant)


MUTANTS = (
    _mutant("no barrier", "  ptx::block_sync();\n", ""),
    _mutant("no barrier, race", "  ptx::block_sync();\n", "", "tsan"),
    _mutant("a shuffle too few", "mask = 16;", "mask = 8;"),
    _mutant("head is not counted", "(columns - head) / Floats::kSize", "columns / Floats::kSize"),
    _mutant("the wrong boundary", "% 16 / sizeof(float)", "% 8 / sizeof(float)"),
    _mutant(
        "head longer than the row",
        "columns < to_boundary ? columns : to_boundary",
        "to_boundary",
    ),
    _mutant("tail one short", "tail + thread < columns", "tail + thread + 1 < columns"),
)
