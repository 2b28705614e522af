"""Test Lightning's Trainer and Fabric on the digits program."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import amp_ext
import digits_program as digits

lightning = pytest.importorskip("lightning", reason="needs it, as in make test-trainers")
plugins = pytest.importorskip("lightning.pytorch.plugins")
ours = pytest.importorskip("amp_ext.integrations.lightning")
HALF = digits.STEPS // 2


class Module(lightning.LightningModule):
    """The digits in two epochs of three steps."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.network = digits.Network()
        self.optimizer = optimizer

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.network(*batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return digits.OPTIMIZERS[self.optimizer](self.parameters())

    def train_dataloader(self) -> Any:
        first = HALF * self.trainer.current_epoch
        return DataLoader(digits.batches()[first : first + HALF], batch_size=None)


class Manual(Module):
    """A module with manual optimization, as in Lightning's documentation."""

    automatic_optimization = False

    def __init__(self, optimizer: str, clip_as: str = "norm") -> None:
        super().__init__(optimizer)
        self.clip_as = clip_as

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.network(*batch))
        self.clip_gradients(optimizer, digits.MAX_NORM, self.clip_as)
        optimizer.step()


def trainer_of(plugin: Any, folder: Path, epochs: int = 2, **arguments: Any) -> Any:
    return lightning.Trainer(
        accelerator="cuda",
        devices=1,
        plugins=plugin,
        max_epochs=epochs,
        reload_dataloaders_every_n_epochs=1,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )


@digits.on_cuda
@digits.every_optimizer
def test_training_is_the_loop(
    device: str, optimizer: str, calls: collections.Counter[str], tmp_path: Path
) -> None:
    plugin, module = ours.MixedPrecision(), Module(optimizer)
    trainer_of(plugin, tmp_path, gradient_clip_val=digits.MAX_NORM).fit(module)
    unscaled_before = {"unscale": digits.STEPS} if optimizer != "fused" else {}
    assert calls == {"clip": digits.STEPS, **unscaled_before}
    assert plugin.scaler.get_skipped_steps() == 1
    digits.assert_learned(module.network)
    digits.assert_same(module.network, digits.written_out(optimizer))


@digits.on_cuda
@digits.every_optimizer
@pytest.mark.parametrize("clip_as", ["norm", "value"])
def test_manual_optimization_is_the_loop(
    device: str, optimizer: str, clip_as: str, tmp_path: Path
) -> None:
    plugin, module = ours.MixedPrecision(), Manual(optimizer, clip_as)
    trainer_of(plugin, tmp_path).fit(module)
    assert plugin.scaler.get_skipped_steps() == 1
    expected = digits.written_out(optimizer, clip_as="scaler" if clip_as == "norm" else clip_as)
    digits.assert_same(module.network, expected)


@digits.on_cuda
@pytest.mark.parametrize("before", ["amp_ext", "lightning"])
def test_resume_is_bit_equal(device: str, before: str, tmp_path: Path) -> None:
    """Resuming is bit-equal, also from checkpoints of Lightning's plugin: both share the key."""
    file = tmp_path / "half.ckpt"
    clip = {"gradient_clip_val": digits.MAX_NORM}
    trainer = trainer_of(ours.MixedPrecision(), tmp_path, epochs=1, **clip)
    trainer.fit(Module("fused"))
    trainer.save_checkpoint(file)
    if before == "lightning":
        theirs = plugins.MixedPrecision("16-mixed", "cuda")
        trainer = trainer_of(theirs, tmp_path, epochs=1)
        trainer.fit(Module("fused"), ckpt_path=file)
        trainer.save_checkpoint(file)
    plugin, module = ours.MixedPrecision(scaler=amp_ext.GradScaler(init_scale=2.0)), Module("fused")
    trainer_of(plugin, tmp_path, **clip).fit(module, ckpt_path=file)
    assert len(module.network.losses) == HALF
    digits.assert_same(module.network, digits.written_out("fused"))
    assert plugin.scaler.get_skipped_steps() == (before == "amp_ext")


@digits.on_cuda
def test_schedules_that_count_the_steps_made(device: str, tmp_path: Path) -> None:
    """Schedules count the steps made by the method of docs/trainers.md."""
    from test_page import names_of

    class Scheduled(Module):
        lr_scheduler_step = names_of("Lightning")["lr_scheduler_step"]

        def configure_optimizers(self) -> dict[str, Any]:
            self.schedule = torch.optim.lr_scheduler.ConstantLR(super().configure_optimizers(), 1.0)
            every_step = {"scheduler": self.schedule, "interval": "step"}
            return {"optimizer": self.schedule.optimizer, "lr_scheduler": every_step}

    module = Scheduled("fused")
    trainer_of(ours.MixedPrecision(), tmp_path, gradient_clip_val=digits.MAX_NORM).fit(module)
    assert module.schedule.last_epoch == digits.STEPS - 1


@digits.on_cuda
def test_the_other_name(device: str, tmp_path: Path) -> None:
    """``pytorch_lightning`` refuses plugins of ``lightning``, and has its own."""
    pytorch_lightning = pytest.importorskip("pytorch_lightning")
    from amp_ext.integrations.pytorch_lightning import Fabric, FabricMixedPrecision, MixedPrecision

    plugin = MixedPrecision()
    trainer = pytorch_lightning.Trainer(
        accelerator="cuda", devices=1, plugins=plugin, logger=False, default_root_dir=tmp_path
    )
    assert trainer.precision_plugin is plugin
    plugin = FabricMixedPrecision()
    assert Fabric(accelerator="cuda", devices=1, plugins=plugin).strategy.precision is plugin


# ---- Fabric --------------------------------------------------------------------------------------


class FabricTraining:
    def __init__(self, optimizer: str, fabric: Any) -> None:
        self.fabric, self.network = fabric, digits.Network()
        self.model, self.optimizer = fabric.setup(
            self.network, digits.OPTIMIZERS[optimizer](self.network.parameters())
        )

    def steps(self, **clip: Any) -> FabricTraining:
        for images, labels in digits.batches():
            self.optimizer.zero_grad()
            self.fabric.backward(self.model(*self.fabric.to_device((images, labels))))
            self.fabric.clip_gradients(
                self.model, self.optimizer, **(clip or {"max_norm": digits.MAX_NORM})
            )
            self.optimizer.step()
        return self


@pytest.fixture
def fabric() -> Any:
    return ours.Fabric(accelerator="cuda", devices=1, plugins=ours.FabricMixedPrecision())


@digits.on_cuda
@digits.every_optimizer
def test_fabric_is_the_loop(
    device: str, optimizer: str, calls: collections.Counter[str], fabric: Any
) -> None:
    """Fabric trains as a loop that is written out."""
    training = FabricTraining(optimizer, fabric).steps()
    assert calls == {"clip": digits.STEPS}
    assert fabric.strategy.precision.scaler.get_skipped_steps() == 1
    digits.assert_learned(training.network)
    digits.assert_same(training.network, digits.written_out(optimizer, images_as="float16"))


@digits.on_cuda
def test_an_overflow_is_an_error_where_one_is_asked_for(device: str, fabric: Any) -> None:
    with pytest.raises(RuntimeError, match="non-finite"):
        FabricTraining("fused", fabric).steps(max_norm=digits.MAX_NORM, error_if_nonfinite=True)


@digits.on_cuda
@pytest.mark.parametrize("second", [{"max_norm": digits.MAX_NORM}, {"clip_val": digits.MAX_NORM}])
def test_optimizers_are_clipped_in_turn(device: str, second: dict, fabric: Any) -> None:
    """Optimizers are clipped in turn: Fabric updates the scaler after each step.

    An earlier clip of another optimizer would be lost.
    """
    pair = [FabricTraining("plain", fabric) for _ in range(2)]
    images, labels = fabric.to_device(digits.batches()[0])
    fabric.backward(sum(training.model(images, labels) for training in pair))
    fabric.clip_gradients(pair[0].model, pair[0].optimizer, **second)
    with pytest.raises(RuntimeError, match="one optimizer after the other"):
        pair[1].optimizer.step()
    pair[0].optimizer.step()
    fabric.clip_gradients(pair[1].model, pair[1].optimizer, **second)
    pair[1].optimizer.step()
