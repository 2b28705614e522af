"""Test Lightning's Fabric on the digits program."""

from __future__ import annotations

import collections
from typing import Any

import pytest

from digits_program import (
    MAX_NORM,
    OPTIMIZERS,
    STEPS,
    Network,
    assert_learned,
    assert_same,
    batches,
    every_optimizer,
    on_cuda,
    written_out,
)

lightning = pytest.importorskip("lightning", reason="needs it, as in make test-trainers")
ours = pytest.importorskip("amp_ext.integrations.lightning")


class Training:
    def __init__(self, optimizer: str, fabric: Any) -> None:
        self.fabric, self.network = fabric, Network()
        self.model, self.optimizer = fabric.setup(
            self.network, OPTIMIZERS[optimizer](self.network.parameters())
        )

    def steps(self, first: int = 0, last: int = STEPS, **clip: Any) -> Training:
        for images, labels in batches()[first:last]:
            self.optimizer.zero_grad()
            self.fabric.backward(self.model(*self.fabric.to_device((images, labels))))
            self.fabric.clip_gradients(
                self.model, self.optimizer, **(clip or {"max_norm": MAX_NORM})
            )
            self.optimizer.step()
        return self


@pytest.fixture
def fabric() -> Any:
    return ours.Fabric(accelerator="cuda", devices=1, plugins=ours.FabricMixedPrecision())


@on_cuda
@every_optimizer
def test_training_is_the_loop(
    device: str, optimizer: str, calls: collections.Counter[str], fabric: Any
) -> None:
    training = Training(optimizer, fabric).steps()
    assert calls == {"clip": STEPS}
    assert fabric.strategy.precision.scaler.get_skipped_steps() == 1
    assert_learned(training.network)
    assert_same(training.network, written_out(optimizer, images_as="float16"))


@on_cuda
def test_an_overflow_is_an_error_where_one_is_asked_for(device: str, fabric: Any) -> None:
    with pytest.raises(RuntimeError, match="non-finite"):
        Training("fused", fabric).steps(max_norm=MAX_NORM, error_if_nonfinite=True)


@on_cuda
@pytest.mark.parametrize("second", [{"max_norm": MAX_NORM}, {"clip_val": MAX_NORM}])
def test_optimizers_are_clipped_in_turn(device: str, second: dict, fabric: Any) -> None:
    """Optimizers are clipped in turn: Fabric updates the scaler after each step.

    An earlier clip of another optimizer would be lost.
    """
    pair = [Training("plain", fabric) for _ in range(2)]
    images, labels = fabric.to_device(batches()[0])
    fabric.backward(sum(training.model(images, labels) for training in pair))
    fabric.clip_gradients(pair[0].model, pair[0].optimizer, **second)
    with pytest.raises(RuntimeError, match="one optimizer after the other"):
        pair[1].optimizer.step()
    pair[0].optimizer.step()
    fabric.clip_gradients(pair[1].model, pair[1].optimizer, **second)
    pair[1].optimizer.step()
