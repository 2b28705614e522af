"""The seed programs under Triton's interpreter, against the CPU's backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import amp_ext
from amp_ext import _triton

CPU = torch.device("cpu")
STEPS = 3
TOLERANCE = 2.0**-9
# With a growth after two steps, and low enough that no step is skipped.
SCALER = {"init_scale": 1024.0, "growth_interval": 2}

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(_triton.triton_version() is None, reason="Triton is not installed"),
    pytest.mark.skipif(not _triton.is_interpreted(), reason="TRITON_INTERPRET is not set"),
]


def checkerboard() -> Any:
    from workloads import checkerboard

    return checkerboard.training("amp_ext", CPU, 8, **SCALER)


def regression() -> Any:
    from workloads import regression

    return regression.training("amp_ext", CPU, regression.batches(), **SCALER)


def digits() -> Any:
    from workloads import digits

    generator = torch.Generator().manual_seed(0)
    images = torch.rand(STEPS, 16, digits.SIDE, digits.SIDE, generator=generator)
    labels = torch.randint(digits.CLASSES, (STEPS, 16), generator=generator)
    return digits.training("amp_ext", CPU, zip(images, labels, strict=True), **SCALER)


@pytest.mark.parametrize("workload", [checkerboard, regression, digits])
def test_trains_as_on_the_cpus_backend(workload: Any) -> None:
    """Both add up in FP32 and round to FP16 once, so that losses differ by what another order of
    summation moves across a rounding: an FP16 rounding, 2^-11, of activations now and then, and
    Adam, whose first steps have the sign of the gradient, by its learning rate where one is nearly
    0. Measured: see TOLERANCE."""
    runs = {}
    for name in ("cpu", "triton"):
        amp_ext.set_backend(name)
        training = workload()
        runs[name] = (list(training.steps(STEPS)), training.scaler.get_scale())
    (expected, scale), (actual, triton_scale) = runs["cpu"], runs["triton"]
    assert triton_scale == scale == 2 * SCALER["init_scale"]
    for one, other in zip(expected, actual, strict=True):
        assert not one.skipped
        assert not other.skipped
        assert other.scale == one.scale
        assert other.loss == pytest.approx(one.loss, rel=TOLERANCE)
