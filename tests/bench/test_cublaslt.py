"""Test that cuBLASLt's fastest algorithm is right in every layout, on a GPU."""

from __future__ import annotations

import pytest
import torch

from cases import integers, stored
from harness import cublaslt

TRANSPOSES = [(a, b) for a in (False, True) for b in (False, True)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("trans", TRANSPOSES, ids=["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_fastest_algorithm_is_right_on_a_gpu(trans, dtype: torch.dtype) -> None:
    """The fastest algorithm is exact on sums of 40 products of integers up to 3."""
    shapes, where = ((24, 40), (40, 16)), torch.device("cuda")
    made = [stored(integers(s, dtype, where), t) for s, t in zip(shapes, trans, strict=True)]
    a, b = (x.mT if t else x for x, t in zip(made, trans, strict=True))
    outs = [torch.zeros(24, 16, device="cuda") for _ in range(2)]
    product = cublaslt.Product(cublaslt.library(), (a, b, outs[0]), 1.0)
    launch = product.launch(product.fastest([(a, b, outs[0])]), (a, b, outs[1]))
    for _ in range(3):
        launch()
    assert torch.equal(outs[1].double(), 3 * (a.double() @ b.double()))
