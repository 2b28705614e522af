"""The benchmark of training steps: its table, and that a wrong training gets no ratio."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import amp_ext
from bench_program import BENCH, quiet, run_quick  # noqa: F401  (a fixture)
from harness import registry
from ops import train
from workloads.networks import GPT2, ResNet50

# ---- what the check finds ----------------------------------------------------------------------


def launch(provider: registry.Provider) -> None:
    with provider.around():
        provider.prepare()
        provider.launch()


def errors_of(dtype: torch.dtype) -> dict[str, dict[str, str]]:
    """By case and provider, after a launch of each."""
    setup = registry.Setup(torch.device("cpu"), quick=True, dtype=dtype)
    errors = {}
    for case in train.cases(setup):
        trial = case.build()
        for provider in trial.providers:
            launch(provider)
        errors[case.name] = trial.verify([provider.name for provider in trial.providers])
    return errors


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_right_training_passes(dtype):
    assert set(map(str, errors_of(dtype).values())) == {"{}"}


class NeverUnscales(amp_ext.GradScaler):
    """Adam hides that: its steps are the same for gradients 1024 times as large."""

    def step(self, optimizer):
        return optimizer.step()

    def update(self):
        pass


class LosesEverySecondStep(amp_ext.GradScaler):
    steps = 0

    def step(self, optimizer):
        self.steps += 1
        if self.steps % 2:
            return super().step(optimizer)
        self.unscale_(optimizer)


class UnscalesToHalf(amp_ext.GradScaler):
    def step(self, optimizer):
        self.unscale_(optimizer)
        for parameter in optimizer.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad /= 2
        return super().step(optimizer)


@pytest.mark.parametrize("scaler", [NeverUnscales, LosesEverySecondStep, UnscalesToHalf])
def test_wrong_scaler_is_found(monkeypatch, scaler):
    monkeypatch.setattr(amp_ext, "GradScaler", scaler)
    errors = errors_of(torch.float16)
    assert len(errors) == 5
    for case, found in errors.items():
        assert list(found) == ["cpu"], case
        assert found["cpu"].startswith("CheckError: "), case


def test_wrong_loss_is_found(monkeypatch):
    """One that is 3% too high is more than the 2% that the check allows."""

    def wrong(name):
        loss = getattr(nn.functional, name)
        return lambda prediction, target: (
            loss(prediction, target) * (1.03 if torch.is_autocast_enabled("cpu") else 1)
        )

    for name in ("mse_loss", "cross_entropy"):
        monkeypatch.setattr(nn.functional, name, wrong(name))
    for found in errors_of(torch.float16).values():
        assert list(found) == ["cpu", "torch"]
        assert all("CheckError: at step 1 the loss is" in error for error in found.values())


def test_skipped_steps_get_no_ratio(tmp_path, monkeypatch):
    monkeypatch.setitem(train.SCALER, "init_scale", 2.0**40)
    status, (_, *records) = run_quick(tmp_path / "out.jsonl", "train", "--filter", "MLP")
    assert status == 1
    for record in records:
        skipped = record["provider"] != "fp32"
        assert bool(record["error"]) == skipped
        if skipped:
            assert record["error"].startswith("CheckError: steps were skipped: the scale is ")


# ---- the networks ------------------------------------------------------------------------------


def test_whole_networks_have_their_parameters():
    with torch.device("meta"):
        sizes = {
            type(s): sum(p.numel() for p in s.network().parameters()) for s in (GPT2(), ResNet50())
        }
    assert sizes == {GPT2: 124_439_808, ResNet50: 25_557_032}
