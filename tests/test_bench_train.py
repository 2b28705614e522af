"""The benchmark of training steps: its table, and that a wrong training gets no ratio."""

from __future__ import annotations

import sys

import torch
from torch import nn

from bench_program import BENCH, quiet, run_quick  # noqa: F401  (a fixture)

sys.path.append(str(BENCH))

import bench_train
import registry
from workloads.networks import GPT2, ResNet50

SEEDS = ("checkerboard 8 x 8", "regression MLP, batch 64", "digits MLP, batch 64")
NETWORKS = ("GPT-2, 2 of 32 wide, 32 tokens", "ResNet of 2 blocks, 4 x 16 px")


def test_benchmark(tmp_path, capsys):
    status, (limit, *records) = run_quick(tmp_path / "out.jsonl", "train")
    table = capsys.readouterr().out
    assert status == 0, table
    assert all(len(line) <= 100 for line in table.splitlines())
    assert limit["case"] == "limit: products of 8 x 8, float32"
    assert [(r["case"], r["provider"]) for r in records] == [
        (case, provider) for case in SEEDS + NETWORKS for provider in ("cpu", "torch", "fp32")
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


def test_wrong_training_gets_no_ratio(tmp_path, capsys, monkeypatch):
    """A loss that is 3% too high is more than the 2% that the check allows."""

    def wrong(name):
        loss = getattr(nn.functional, name)
        return lambda prediction, target: (
            loss(prediction, target) * (1.03 if torch.is_autocast_enabled("cpu") else 1)
        )

    for name in ("mse_loss", "cross_entropy"):
        monkeypatch.setattr(nn.functional, name, wrong(name))
    status, (_, *records) = run_quick(tmp_path / "out.jsonl", "train")
    table = capsys.readouterr().out
    assert status == 1
    assert table.count("NO RATIO, CheckError: at step 1 the loss is") == 5
    assert all(r["error"] and r["ratio"] is None for r in records)


def test_skipped_steps_get_no_ratio(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(bench_train.SCALER, "init_scale", 2.0**40)
    status, _ = run_quick(tmp_path / "out.jsonl", "train", "--filter", "MLP")
    assert status == 1
    assert "CheckError: cpu skipped steps: its scale is" in capsys.readouterr().out


def test_bf16(tmp_path, capsys):
    status, (_, *records) = run_quick(
        tmp_path / "out.jsonl", "train", "--dtype", "bf16", "--filter", "digits"
    )
    assert status == 0, capsys.readouterr().out
    assert {record["case"] for record in records} == {"digits MLP, batch 64, bf16"}


def test_whole_networks_have_their_parameters():
    with torch.device("meta"):
        sizes = {
            type(s): sum(p.numel() for p in s.network().parameters()) for s in (GPT2(), ResNet50())
        }
    assert sizes == {GPT2: 124_439_808, ResNet50: 25_557_032}


def test_networks_on_a_gpu_are_whole():
    names = [case.name for case in bench_train.cases(registry.Setup(torch.device("cuda")))]
    assert names[-2:] == ["GPT-2 small, 8 x 1024 tokens", "ResNet-50, 64 images of 224"]
