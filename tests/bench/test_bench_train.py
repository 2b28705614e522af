"""The benchmark of training steps: its table, and that a wrong training gets no ratio."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import amp_ext
from ops import train as bench_train
from harness import providers
from harness import registry
from harness import timing
from bench_program import BENCH, quiet, run_quick  # noqa: F401  (a fixture)
from workloads.networks import GPT2, ResNet50

SEEDS = ("checkerboard 8 x 8", "regression MLP, batch 64", "digits MLP, batch 64")
NETWORKS = ("GPT-2, 2 of 32 wide, 32 tokens", "ResNet of 2 blocks, 4 x 16 px")


def test_benchmark(tmp_path, capsys):
    status, (limit, *records) = run_quick(tmp_path / "out.jsonl", "train")
    table = capsys.readouterr().out
    assert status == 0, table
    assert all(len(line) <= 100 for line in table.splitlines())
    assert (limit["case"], limit["limit"]) == ("products of 8 x 8, float32", True)
    assert [(r["case"], r["provider"], r["dtype"]) for r in records] == [
        (case, provider, "fp16")
        for case in SEEDS + NETWORKS
        for provider in ("cpu", "torch", "fp32")
    ]
    for ours, theirs, fp32 in zip(*3 * [iter(records)], strict=True):
        assert ours["ratio"] == theirs["p20_us"] / ours["p20_us"]
        assert fp32["ratio"] == theirs["p20_us"] / fp32["p20_us"]
        assert theirs["ratio"] is None
    mean = torch.tensor([r["ratio"] for r in records[::3]]).log().mean().exp().item()
    assert table.splitlines()[-1].split() == [
        *("geometric", "mean", "of", "5", "ratios", "cpu"),
        f"{mean:.2f}",
    ]


# ---- what the check finds ----------------------------------------------------------------------


def errors_of(dtype: torch.dtype) -> dict[str, dict[str, str]]:
    """By case and provider, after three launches of each."""
    setup = registry.Setup(torch.device("cpu"), quick=True, dtype=dtype)
    errors = {}
    for case in bench_train.cases(setup):
        trial = case.build()
        for provider in 3 * trial.providers:
            timing.launch_once(provider)
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
    monkeypatch.setitem(bench_train.SCALER, "init_scale", 2.0**40)
    status, (_, *records) = run_quick(tmp_path / "out.jsonl", "train", "--filter", "MLP")
    assert status == 1
    for record in records:
        skipped = record["provider"] != "fp32"
        assert bool(record["error"]) == skipped
        if skipped:
            assert record["error"].startswith("CheckError: steps were skipped: the scale is ")


def test_a_network_is_built_once():
    """Lines train copies of it; the original stays at its start."""
    made = []

    def start(amp, device):
        made.append(bench_train.digits_trainer(amp, device))
        return made[-1]

    trial = bench_train.build(start, torch.float16, registry.Setup(torch.device("cpu")))
    (pattern,) = made
    before = [parameter.clone() for parameter in pattern.network.parameters()]
    for provider in trial.providers:
        timing.launch_once(provider)
    assert trial.verify([provider.name for provider in trial.providers]) == {}
    assert len(made) == 1
    assert all(a.equal(b) for a, b in zip(before, pattern.network.parameters(), strict=True))


def test_fp32_is_without_tf32():
    start = bench_train.regression_trainer
    trial = bench_train.build(start, torch.float16, registry.Setup(torch.device("cpu")))
    around = {provider.name: provider.around for provider in trial.providers}
    assert around["fp32"] is providers.without_tf32
    assert around["torch"] is not providers.without_tf32


# ---- the networks ------------------------------------------------------------------------------


def test_whole_networks_have_their_parameters():
    with torch.device("meta"):
        sizes = {
            type(s): sum(p.numel() for p in s.network().parameters()) for s in (GPT2(), ResNet50())
        }
    assert sizes == {GPT2: 124_439_808, ResNet50: 25_557_032}


def test_networks_on_a_gpu_are_whole():
    names = [case.name for case in bench_train.cases(registry.Setup(torch.device("cuda")))]
    assert names[-2:] == ["GPT-2 small, 8 x 1024 tokens", "ResNet-50, 64 images of 224"]
