"""Test the imports of the integrations, and their shared parts."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

import programs

PACKAGES = {
    "lightning": "lightning",
    "pytorch_lightning": "lightning_fabric",
    "accelerate": "accelerate",
    "transformers": "transformers",
    "timm": "timm",
}


def test_importing_amp_ext_imports_nothing_heavy() -> None:
    """The import takes no trainer, no Triton and no DTensor with it; flops are counted later."""
    said = programs.output("""
        import sys, torch
        before = set(sys.modules)
        import amp_ext
        print(*set(sys.modules) - before)
        from torch.utils.flop_counter import FlopCounterMode
        with FlopCounterMode(display=False) as counter:
            amp_ext.ops.gemm(torch.ones(2, 2), torch.ones(2, 2))
        print(counter.get_total_flops())
    """).splitlines()
    heavy = {*PACKAGES.values(), "amp_ext.integrations", "triton", "torch.utils.flop_counter"}
    assert not heavy & set(said[0].split())
    assert "distributed" not in said[0]
    assert said[1] == "16"


@pytest.mark.parametrize("module", PACKAGES)
def test_a_package_that_is_missing_is_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, PACKAGES[module], None)
    monkeypatch.delitem(sys.modules, f"amp_ext.integrations.{module}", raising=False)
    with pytest.raises(ImportError) as error:
        importlib.import_module(f"amp_ext.integrations.{module}")
    assert error.value.name.split(".")[0] == PACKAGES[module]


def test_frozen_parameters_do_not_matter() -> None:
    from amp_ext.integrations import has_gradients_of

    frozen, first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    first.grad = second.grad = torch.ones(2)
    optimizer = torch.optim.SGD([frozen, first], lr=1.0)
    assert has_gradients_of(optimizer, [first])
    assert has_gradients_of(optimizer, iter([first, torch.nn.Parameter(torch.ones(2))]))
    assert not has_gradients_of(optimizer, [first, second])
    assert not has_gradients_of(optimizer, [frozen])
