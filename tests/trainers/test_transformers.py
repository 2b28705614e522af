"""Test transformers' Trainer on the digits program."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from digits_program import (
    BATCH,
    MAX_NORM,
    OPTIMIZERS,
    OVERFLOW,
    STEPS,
    Network,
    assert_learned,
    assert_same,
    every_optimizer,
    on_cuda,
    samples,
    written_out,
)

transformers = pytest.importorskip("transformers", reason="needs it, as in make test-trainers")
accelerate = pytest.importorskip("accelerate", reason="needs it, as in make test-trainers")
ours = pytest.importorskip("amp_ext.integrations.transformers")


@pytest.fixture(autouse=True)
def _one_trainer() -> Iterator[None]:
    """The state of its accelerator is the process's."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


class ForTrainer(Network):
    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor]:
        return (super().forward(images, labels),)


def trainer_of(kind: type, optimizer: str, folder: Path, **arguments: Any) -> Any:
    network = ForTrainer()
    stepping = OPTIMIZERS[optimizer](network.parameters())
    schedule = torch.optim.lr_scheduler.ConstantLR(stepping, 1.0)
    settings = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        max_grad_norm=MAX_NORM,
        train_sampling_strategy="sequential",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **{"fp16": True, "save_strategy": "no", **arguments},
    )
    data = [{"images": images, "labels": labels} for images, labels in samples()]
    return kind(network, settings, train_dataset=data, optimizers=(stepping, schedule))


@on_cuda
@every_optimizer
def test_training_is_the_loop(
    device: str,
    optimizer: str,
    calls: collections.Counter[str],
    installed: None,
    tmp_path: Path,
) -> None:
    trainer = trainer_of(ours.Trainer, optimizer, tmp_path)
    trainer.train()
    assert calls == {"clip": STEPS}
    assert trainer.lr_scheduler.last_epoch == STEPS - 1
    assert trainer.accelerator.scaler.get_skipped_steps() == 1
    norms = [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
    assert [norm < torch.inf for norm in norms] == [step != OVERFLOW for step in range(STEPS)]
    assert_learned(trainer.model)
    assert_same(trainer.model, written_out(optimizer))


@on_cuda
def test_a_trainer_of_ones_own(device: str, tmp_path: Path) -> None:
    class MyTrainer(ours.ScalerMixin, transformers.Trainer):
        scaler_options = {"init_scale": 1024.0, "hysteresis": 2}  # noqa: RUF012

    trainer = trainer_of(MyTrainer, "fused", tmp_path)
    trainer.train()
    assert trainer.lr_scheduler.last_epoch == STEPS - 1
    assert trainer.accelerator.scaler.get_scale() == 1024.0


@on_cuda
def test_installed_alone(
    device: str, calls: collections.Counter[str], installed_scaler: None, tmp_path: Path
) -> None:
    """After install() alone, the trainer's own scaler is amp_ext's."""
    trainer = trainer_of(transformers.Trainer, "plain", tmp_path)
    trainer.train()
    assert calls == {"unscale": STEPS}
    assert trainer.lr_scheduler.last_epoch == STEPS - 1
    assert trainer.accelerator.scaler.get_skipped_steps() == 1
    assert_learned(trainer.model)
    assert_same(trainer.model, written_out("plain", clip_as="torch"))
