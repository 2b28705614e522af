"""Test LoRA by peft in regions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import amp_ext
import amp_ext.optim
from amp_ext.compat.apex import amp

peft = pytest.importorskip("peft", reason="needs it, as in make test-trainers")

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() and amp_ext._C.cuda_built() else [])]
every_device = pytest.mark.parametrize("device", DEVICES)


def with_adapters(network: nn.Module) -> nn.Module:
    """Add adapters whose initial weights are not 0."""
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["0"])
    return peft.get_peft_model(network, config)


def float16_inputs(device: str) -> Tensor:
    """8 x 24 float32 that float16 represents."""
    return torch.randn(8, 24).half().float().to(device)


@every_device
def test_every_adapter_trains_and_nothing_else(device: str) -> None:
    network = with_adapters(nn.Sequential(nn.Linear(24, 16))).to(device)
    named = dict(network.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    trained = [name for name in named if "lora_" in name]
    assert len(trained) == 2
    scaler = amp_ext.GradScaler(device, init_scale=2.0**8)
    optimizer = amp_ext.optim.AdamW([named[name] for name in trained], lr=1e-3)
    with amp_ext.autocast(device, torch.float16):
        loss = network(float16_inputs(device)).square().mean()
    scaler.scale(loss).backward()
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.step_was_skipped
    for name, parameter in named.items():
        assert torch.equal(parameter, before[name]) is (name not in trained), name


@every_device
@pytest.mark.parametrize("order", ["before", "after", "alone"])
def test_apexs_o1_reaches_adapters(device: str, order: str) -> None:
    """Apex's O1 reaches adapters of a model wrapped before or after amp.initialize.

    peft calls the model's forward without its module's __call__.
    """
    network = nn.Sequential(nn.Linear(24, 16)).to(device)
    if order == "before":
        network = with_adapters(network)
    network = amp.initialize(network, verbosity=0)
    if order == "after":
        network = with_adapters(network)
    dtypes = []
    layers = [module for module in network.modules() if type(module) is nn.Linear]
    for layer in layers:
        layer.register_forward_hook(lambda module, given, result: dtypes.append(result.dtype))
    assert network(float16_inputs(device)).dtype == torch.float32
    assert dtypes == [torch.float16] * (1 if order == "alone" else 3)
