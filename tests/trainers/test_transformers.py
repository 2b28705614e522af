"""Test transformers' Trainer on the digits program."""

import collections
from pathlib import Path
from typing import Any

import pytest
import torch

import amp_ext
import digits_program as digits

transformers = pytest.importorskip("transformers", reason="needs it, as in make test-trainers")
accelerate = pytest.importorskip("accelerate", reason="needs it, as in make test-trainers")
ours = pytest.importorskip("amp_ext.integrations.transformers")
pytestmark = digits.on_cuda


class ForTrainer(digits.Network):
    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor]:
        return (super().forward(images, labels),)


def trained(kind: type, optimizer: str, folder: Path) -> Any:
    """Return a trainer whose schedule has counted the steps made."""
    network = ForTrainer()
    stepping = digits.OPTIMIZERS[optimizer](network.parameters())
    settings = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=digits.STEPS,
        per_device_train_batch_size=digits.BATCH,
        max_grad_norm=digits.MAX_NORM,
        train_sampling_strategy="sequential",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        fp16=True,
        save_strategy="no",
    )
    data = [{"images": images, "labels": labels} for images, labels in digits.samples()]
    optimizers = stepping, torch.optim.lr_scheduler.ConstantLR(stepping, 1.0)
    trainer = kind(network, settings, train_dataset=data, optimizers=optimizers)
    trainer.train()
    assert trainer.lr_scheduler.last_epoch == digits.STEPS - 1
    assert trainer.accelerator.scaler.get_skipped_steps() == 1
    return trainer


@digits.every_optimizer
def test_training_is_the_loop(
    optimizer: str, calls: collections.Counter[str], tmp_path: Path
) -> None:
    amp_ext.install()
    trainer = trained(ours.Trainer, optimizer, tmp_path)
    assert calls == {"clip": digits.STEPS}
    norms = [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
    assert [norm < torch.inf for norm in norms] == [
        step != digits.OVERFLOW for step in range(digits.STEPS)
    ]
    digits.assert_is_the_loop(trainer.model, optimizer)


def test_installed_alone(calls: collections.Counter[str], tmp_path: Path) -> None:
    """After install() alone, the trainer's own scaler is amp_ext's."""
    amp_ext.install(scaler=True)
    trainer = trained(transformers.Trainer, "plain", tmp_path)
    assert calls == {"unscale": digits.STEPS}
    digits.assert_is_the_loop(trainer.model, "plain", clip_as="torch")
