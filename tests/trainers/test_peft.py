"""Test LoRA by peft in regions."""

import pytest
import torch
from torch import nn

import amp_ext
import amp_ext.optim
from twins import CUDA

peft = pytest.importorskip("peft", reason="needs it, as in make test-trainers")


@pytest.mark.parametrize("device", ["cpu", *CUDA])
def test_every_adapter_trains_and_nothing_else(device: str) -> None:
    """Adapters have no initial weight of 0, so that all of them have gradients."""
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["0"])
    network = peft.get_peft_model(nn.Sequential(nn.Linear(24, 16)), config).to(device)
    named = dict(network.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    trained = [name for name in named if "lora_" in name]
    assert len(trained) == 2
    scaler = amp_ext.GradScaler(device, init_scale=2.0**8)
    optimizer = amp_ext.optim.AdamW([named[name] for name in trained], lr=1e-3)
    with amp_ext.autocast(device, torch.float16):
        loss = network(torch.randn(8, 24, device=device)).square().mean()
    scaler.scale(loss).backward()
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.step_was_skipped
    for name, parameter in named.items():
        assert torch.equal(parameter, before[name]) is (name not in trained), name
