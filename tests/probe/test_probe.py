"""Test that the PTX executor passes the hardware probes."""

import pytest
import torch

from fake_cuda.recorder import schedule
from probe import run


@pytest.mark.full
@pytest.mark.fake_cuda
def test_executor_agrees() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    for seed in range(3):
        with schedule(seed):
            assert [fault for name in run.PROBES if (fault := run.check(name, seed))] == []
