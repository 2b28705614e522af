"""Test that regions belong to their thread while threads share weights and copies."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import amp_ext
from autocast_cases import routed
from programs import run

PROGRAM = Path(__file__).with_name("threads_program.py")
FP16 = {"device_type": "cpu", "dtype": torch.float16}


def test_every_thread_has_its_own_regions() -> None:
    """A thread in amp_ext's region, one in torch's and one without a region do not interact."""
    barrier = threading.Barrier(3)
    regions = [amp_ext.autocast(**FP16), torch.autocast(**FP16), contextlib.nullcontext()]

    def work(region: Any) -> list[bool]:
        seen = []
        for _ in range(20):
            barrier.wait(60)
            with region:
                barrier.wait(60)
                seen.append(routed())
                barrier.wait(60)
            seen.append(routed())
        return seen

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        seen = list(pool.map(work, regions))
    assert seen == [20 * [True, False], 40 * [False], 40 * [False]]


def test_threads_share_weights() -> None:
    """Each thread's gradient is right, and so is their sum in the shared weight."""
    weight = torch.randint(-3, 4, (4, 4)).float().requires_grad_()
    inputs = [torch.randint(-3, 4, (2, 4)).float() for _ in range(4)]

    def work(value: Tensor) -> None:
        for dtype in 10 * [torch.float16, torch.bfloat16]:
            with amp_ext.autocast("cpu", dtype):
                result = value @ weight
                torch.clear_autocast_cache()
                result = result + value @ weight
            result.sum().backward()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(work, inputs))
    expected = 2 * 20 * sum(inputs).sum(0)
    assert weight.grad.equal(expected[:, None].expand(4, 4))


@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.full)])
def test_no_thread_waits_for_ever(count: int) -> None:
    """Autocast holds no lock where Python code may run."""
    package = str(Path(amp_ext.__file__).parents[1])
    done = run(str(PROGRAM), str(count), PYTHONPATH=package)
    assert done.returncode == 0, done.stderr
