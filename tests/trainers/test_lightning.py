"""Test Lightning's Trainer and Fabric on the digits program."""

import collections
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import amp_ext
import digits_program as digits
from test_page import names_of

lightning = pytest.importorskip("lightning", reason="needs it, as in make test-trainers")
plugins = pytest.importorskip("lightning.pytorch.plugins")
ours = pytest.importorskip("amp_ext.integrations.lightning")
pytestmark = digits.on_cuda
HALF = digits.STEPS // 2


class Module(lightning.LightningModule):
    """The digits in two epochs of three steps. The page's method lets schedules count steps."""

    lr_scheduler_step = names_of("Lightning")["lr_scheduler_step"]

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.network = digits.Network()
        self.optimizer = optimizer

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.network(*batch)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = digits.OPTIMIZERS[self.optimizer](self.parameters())
        self.schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        every_step = {"scheduler": self.schedule, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": every_step}

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


def trained(module: Module, plugin: Any, folder: Path, epochs: int = 2, **arguments: Any) -> Any:
    """Return the trainer."""
    checkpoint = arguments.pop("ckpt_path", None)
    trainer = lightning.Trainer(
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
    trainer.fit(module, ckpt_path=checkpoint)
    return trainer


@digits.every_optimizer
def test_training_is_the_loop(
    optimizer: str, calls: collections.Counter[str], tmp_path: Path
) -> None:
    plugin, module = ours.MixedPrecision(), Module(optimizer)
    trained(module, plugin, tmp_path, gradient_clip_val=digits.MAX_NORM)
    unscaled_before = {"unscale": digits.STEPS} if optimizer != "fused" else {}
    assert calls == {"clip": digits.STEPS, **unscaled_before}
    assert plugin.scaler.get_skipped_steps() == 1
    assert module.schedule.last_epoch == digits.STEPS - 1
    digits.assert_is_the_loop(module.network, optimizer)


@digits.every_optimizer
@pytest.mark.parametrize("clip_as", ["norm", "value"])
def test_manual_optimization_is_the_loop(optimizer: str, clip_as: str, tmp_path: Path) -> None:
    module = Manual(optimizer, clip_as)
    trained(module, ours.MixedPrecision(), tmp_path)
    expected = "scaler" if clip_as == "norm" else clip_as
    digits.assert_is_the_loop(module.network, optimizer, clip_as=expected)


def clipped_as(algorithms: list[str], optimizer: str) -> list[float]:
    """Return gradients of 0.25 and 2 after a clip to 1 by the bare optimizer, then to 0.5."""
    plugin, weight = ours.MixedPrecision(), torch.nn.Parameter(torch.ones(2, device="cuda"))
    stepping = digits.OPTIMIZERS[optimizer]([weight])
    plugin.scaler.scale(weight @ weight.new_tensor([0.25, 2.0])).backward()
    wrapped = lightning.pytorch.core.optimizer.LightningOptimizer(stepping)
    for given, limit, algorithm in zip((stepping, wrapped), (1.0, 0.5), algorithms, strict=True):
        plugin.clip_gradients(given, limit, algorithm)
    return weight.grad.tolist()


@digits.every_optimizer
def test_values_are_clipped_after_unscaling_once(optimizer: str) -> None:
    assert clipped_as(["value", "value"], optimizer) == [0.25, 0.5]


@pytest.mark.parametrize("optimizer", ["fused", "amp_ext.optim"])
def test_no_values_are_clipped_after_a_norm_left_to_the_step(optimizer: str) -> None:
    with pytest.raises(RuntimeError, match="has already been called"):
        clipped_as(["norm", "value"], optimizer)


@digits.every_optimizer
def test_training_goes_on_after_batches_without_a_loss(optimizer: str, tmp_path: Path) -> None:
    class Choosy(Module):
        def training_step(self, batch: Any, index: int) -> torch.Tensor | None:
            return super().training_step(batch, index) if index == 1 else None

    module = Choosy(optimizer)
    trainer = trained(module, ours.MixedPrecision(), tmp_path, gradient_clip_val=1.0)
    assert trainer.precision_plugin.scaler.state_dict()["_growth_tracker"] == 2


def test_the_scale_of_a_guard_stays_in_its_checkpoints() -> None:
    guard = amp_ext.GradScaler(init_scale=1.0, dynamic=False)
    digits.assert_takes_and_gives_no_scale(ours.MixedPrecision("bf16-mixed", scaler=guard).scaler)


@pytest.mark.parametrize("before", ["amp_ext", "lightning"])
def test_resume_is_bit_equal(before: str, tmp_path: Path) -> None:
    """Resuming is bit-equal, also from checkpoints of Lightning's plugin: both share the key."""
    file = tmp_path / "half.ckpt"
    clip = {"gradient_clip_val": digits.MAX_NORM}
    trained(Module("fused"), ours.MixedPrecision(), tmp_path, 1, **clip).save_checkpoint(file)
    if before == "lightning":
        theirs = plugins.MixedPrecision("16-mixed", "cuda")
        trainer = trained(Module("fused"), theirs, tmp_path, 1, ckpt_path=file)
        trainer.save_checkpoint(file)
    plugin, module = ours.MixedPrecision(scaler=amp_ext.GradScaler(init_scale=2.0)), Module("fused")
    trained(module, plugin, tmp_path, ckpt_path=file, **clip)
    assert len(module.network.losses) == HALF
    digits.assert_is_the_loop(module.network, "fused")
    assert plugin.scaler.get_skipped_steps() == (before == "amp_ext")


def test_the_other_name(tmp_path: Path) -> None:
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


@pytest.fixture
def fabric() -> Any:
    return ours.Fabric(accelerator="cuda", devices=1, plugins=ours.FabricMixedPrecision())


def set_up(fabric: Any, optimizer: str) -> tuple[digits.Network, Any, Any]:
    network = digits.Network()
    return network, *fabric.setup(network, digits.OPTIMIZERS[optimizer](network.parameters()))


@digits.every_optimizer
def test_fabric_is_the_loop(optimizer: str, calls: collections.Counter[str], fabric: Any) -> None:
    network, model, stepping = set_up(fabric, optimizer)
    for images, labels in digits.batches():
        stepping.zero_grad()
        fabric.backward(model(*fabric.to_device((images, labels))))
        fabric.clip_gradients(model, stepping, max_norm=digits.MAX_NORM)
        stepping.step()
    assert calls == {"clip": digits.STEPS}
    assert fabric.strategy.precision.scaler.get_skipped_steps() == 1
    digits.assert_is_the_loop(network, optimizer, images_as="float16")


def test_an_overflow_is_an_error_where_one_is_asked_for(fabric: Any) -> None:
    _, model, optimizer = set_up(fabric, "fused")
    fabric.backward(model(*fabric.to_device(digits.batches()[digits.OVERFLOW])))
    with pytest.raises(RuntimeError, match="non-finite"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("second", ["max_norm", "clip_val"])
def test_optimizers_are_clipped_in_turn(second: str, fabric: Any) -> None:
    """Fabric updates the scaler after each step, which would lose another optimizer's clip."""
    (_, *first), (_, *other) = (set_up(fabric, "plain") for _ in range(2))
    images, labels = fabric.to_device(digits.batches()[0])
    fabric.backward(sum(model(images, labels) for model in (first[0], other[0])))
    fabric.clip_gradients(*first, **{second: digits.MAX_NORM})
    with pytest.raises(RuntimeError, match="one optimizer after the other"):
        other[1].step()
    first[1].step()
    fabric.clip_gradients(*other, **{second: digits.MAX_NORM})
    other[1].step()
