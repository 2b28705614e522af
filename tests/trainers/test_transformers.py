"""Test transformers' Trainer on the digits program."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import pytest
import torch

import digits_program as digits

transformers = pytest.importorskip("transformers", reason="needs it, as in make test-trainers")
accelerate = pytest.importorskip("accelerate", reason="needs it, as in make test-trainers")
ours = pytest.importorskip("amp_ext.integrations.transformers")
pytestmark = pytest.mark.usefixtures("one_accelerator")


class ForTrainer(digits.Network):
    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor]:
        return (super().forward(images, labels),)


def trainer_of(kind: type, optimizer: str, folder: Path, **arguments: Any) -> Any:
    network = ForTrainer()
    stepping = digits.OPTIMIZERS[optimizer](network.parameters())
    schedule = torch.optim.lr_scheduler.ConstantLR(stepping, 1.0)
    settings = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=digits.STEPS,
        per_device_train_batch_size=digits.BATCH,
        max_grad_norm=digits.MAX_NORM,
        train_sampling_strategy="sequential",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **{"fp16": True, "save_strategy": "no", **arguments},
    )
    data = [{"images": images, "labels": labels} for images, labels in digits.samples()]
    return kind(network, settings, train_dataset=data, optimizers=(stepping, schedule))


@digits.on_cuda
@digits.every_optimizer
def test_training_is_the_loop(
    device: str,
    optimizer: str,
    calls: collections.Counter[str],
    installed: None,
    tmp_path: Path,
) -> None:
    trainer = trainer_of(ours.Trainer, optimizer, tmp_path)
    trainer.train()
    assert calls == {"clip": digits.STEPS}
    assert trainer.lr_scheduler.last_epoch == digits.STEPS - 1
    assert trainer.accelerator.scaler.get_skipped_steps() == 1
    norms = [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
    assert [norm < torch.inf for norm in norms] == [
        step != digits.OVERFLOW for step in range(digits.STEPS)
    ]
    digits.assert_learned(trainer.model)
    digits.assert_same(trainer.model, digits.written_out(optimizer))


@digits.on_cuda
def test_a_trainer_of_ones_own(device: str, tmp_path: Path) -> None:
    class MyTrainer(ours.ScalerMixin, transformers.Trainer):
        scaler_options = {"init_scale": 1024.0, "hysteresis": 2}  # noqa: RUF012

    trainer = trainer_of(MyTrainer, "fused", tmp_path)
    trainer.train()
    assert trainer.lr_scheduler.last_epoch == digits.STEPS - 1
    assert trainer.accelerator.scaler.get_scale() == 1024.0


@digits.on_cuda
def test_installed_alone(
    device: str, calls: collections.Counter[str], installed_scaler: None, tmp_path: Path
) -> None:
    """After install() alone, the trainer's own scaler is amp_ext's."""
    trainer = trainer_of(transformers.Trainer, "plain", tmp_path)
    trainer.train()
    assert calls == {"unscale": digits.STEPS}
    assert trainer.lr_scheduler.last_epoch == digits.STEPS - 1
    assert trainer.accelerator.scaler.get_skipped_steps() == 1
    digits.assert_learned(trainer.model)
    digits.assert_same(trainer.model, digits.written_out("plain", clip_as="torch"))
