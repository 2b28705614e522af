"""Test GradScaler.overflow_report: names of gradients that are not finite, and its limits."""

import gc
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_ext.scaler import OverflowReport
from twins import DEVICES, OURS, finish, leaf, params, sgd, sparse_leaf, started

INF, NAN = math.inf, math.nan
NOTHING = OverflowReport()


def overflowed(*leaves: Tensor, **options: Any) -> tuple[Any, Optimizer]:
    """Return a scaler and an optimizer after a skipped step."""
    scaler, optimizer = started(OURS, **options), sgd(*leaves)
    finish(scaler, optimizer)
    return scaler, optimizer


def names(report: OverflowReport) -> list[str]:
    return [gradient.name for gradient in report.gradients]


# ---- text of a report --------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_counts_and_text(device: str) -> None:
    bad = leaf([[INF, 1.0, -INF], [NAN, INF, 0.0]], device=device)
    wide = leaf([0.0, NAN], torch.float64, device=device)
    scaler, _optimizer = overflowed(leaf([1.0], device=device), bad, wide, device=device)
    report = scaler.overflow_report()
    assert report and scaler.get_scale() == 2.0
    assert (report.overflow, report.examined, len(report.gradients)) == (True, 3, 2)
    assert str(report) == (
        "2 of 3 gradients are not finite:\n"
        "  param_groups[0]['params'][1]: 2 inf, 1 -inf, 1 NaN of 6 elements, "
        f"float32 [2, 3] on {bad.device}\n"
        f"  param_groups[0]['params'][2]: 1 NaN of 2 elements, float64 [2] on {bad.device}"
    )


def test_names_that_are_given() -> None:
    """Names of the call come before names of the optimizer, and these before places in a clip."""
    network, scaler = nn.Linear(1, 1), started(OURS)
    pairs = [(f"own.{name}", param) for name, param in network.named_parameters()]
    optimizer = torch.optim.SGD(pairs, lr=0.1)
    network.weight.grad, network.bias.grad = torch.tensor([[NAN]]), torch.tensor([INF])
    scaler.unscale_(optimizer)
    scaler.clip_grad_norm_(network.parameters(), 1.0)
    finish(scaler, optimizer)
    assert names(scaler.overflow_report()) == ["own.weight", "own.bias"]
    for given in (network, network.named_parameters(), dict(network.named_parameters()).items()):
        assert names(scaler.overflow_report(given)) == ["weight", "bias"]
    given = [("mine", network.weight)]
    assert names(scaler.overflow_report(given)) == ["mine", "own.bias"]
    del optimizer.param_groups[0]["params"][0]  # its names are no longer those of places
    assert names(scaler.overflow_report()) == ["param_groups[0]['params'][0]"]


def test_sparse_gradient() -> None:
    scaler, _optimizer = overflowed(sparse_leaf(torch.float32, (INF, 1.0, -INF)))
    assert "1 inf, 1 -inf of 3 elements, float32 [5]" in str(scaler.overflow_report())


# ---- time and extent of a report ---------------------------------------------------------------


@pytest.mark.parametrize("call", ["unscale_", "clip_grad_norm_", "_check_inf_per_device", "step"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("own_way", [False, True])
def test_within_the_step_and_after_it(own_way: bool, fused: bool, call: str) -> None:
    unscale = {"_unscale_grads_": lambda *args: OURS._unscale_grads_(*args)}
    scaler = started(type("GradScaler", (OURS,), unscale if own_way else {}))
    optimizer = torch.optim.Adam([leaf([1.0]), leaf([NAN])], fused=fused)
    options = (1.0,) if call == "clip_grad_norm_" else ()
    getattr(scaler, call)(optimizer, *options)
    within = scaler.overflow_report()
    assert names(within) == ["param_groups[0]['params'][1]"]
    scaler.update()
    assert scaler.overflow_report() == within
    scaler.update(8.0)
    assert scaler.overflow_report() == NOTHING


def test_norms_beyond_the_range_of_their_type_are_no_overflow() -> None:
    """A norm beyond float32, or a sum of squares beyond its type, is no overflow."""
    large = leaf([3e38, 3e38]), leaf([1e200], torch.float64)
    scaler, _optimizer = overflowed(*large, leaf([1.0]), leaf([INF]))
    assert names(scaler.overflow_report()) == ["param_groups[0]['params'][3]"]


def test_several_optimizers() -> None:
    """Optimizers with an overflow are reported, a parameter of two of them once.

    A gradient of another optimizer is not reported, though it is spoilt later.
    """
    scaler, shared = started(OURS), leaf(INF)
    optimizers = sgd(leaf(1.0)), sgd(shared, leaf(2.0)), sgd(shared)
    for optimizer in optimizers:
        scaler.step(optimizer)
    (good,) = params(optimizers[0])
    good.grad.fill_(NAN)
    report = scaler.overflow_report([("good", good), ("bad", shared)])
    assert (names(report), report.examined) == (["bad"], 2)


# ---- when it comes too late --------------------------------------------------------------------


def test_overwritten_gradients() -> None:
    scaler, optimizer = overflowed(leaf([INF]), leaf([1.0]), torch.ones(2))
    optimizer.zero_grad(set_to_none=False)
    report = scaler.overflow_report()
    assert not report
    assert "of 2 gradients none is infinite or NaN now" in str(report)
    optimizer.zero_grad()
    assert scaler.overflow_report() == OverflowReport(overflow=True)


def test_optimizers_are_held_weakly_and_forgotten() -> None:
    scaler, optimizer = overflowed(leaf([INF]))
    del optimizer
    gc.collect()
    assert scaler.overflow_report() == OverflowReport(overflow=True)
    for _ in range(2):
        finish(scaler, sgd(leaf(1.0)))
    assert len(scaler._last_states) == 1
