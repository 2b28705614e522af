"""Test Keras's policies on modules of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import amp_ext
from amp_ext.compat.keras import apply_policy

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("float16", "got 'float16'. Variables stay float32: write 'mixed_float16'"),
        ("mixed_float8", "one of 'float32', 'mixed_float16', 'mixed_bfloat16', got"),
        (torch.float16, "got torch.float16"),
    ],
    ids=str,
)
def test_bad_policies(name: Any, text: str) -> None:
    """A name that is no policy's is an error, and the module stays."""
    module = nn.ReLU()
    with pytest.raises(ValueError, match=f"apply_policy: policy: .*{text}"):
        apply_policy(module, name)
    assert type(module) is nn.ReLU


def types(model: nn.Module) -> list[torch.dtype]:
    """Return the dtypes of the layers' results, without a region and in one of bfloat16."""
    x = torch.ones(2, 4)
    seen = []
    hooks = [layer.register_forward_hook(lambda *a: seen.append(a[2].dtype)) for layer in model]
    model(x)
    with amp_ext.autocast("cpu", BF16):
        model(x)
    for hook in hooks:
        hook.remove()
    return seen


def test_a_modules_own_policy_wins() -> None:
    """A submodule's policy replaces the outer one, and both replace the caller's region."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert types(model) == [FP32, FP32, BF16, BF16]
    apply_policy(model, "mixed_float16")
    assert types(model) == [FP16, FP16, FP16, FP16]
    apply_policy(model[1], "float32")
    assert types(model) == [FP16, FP32, FP16, FP32]
    assert model[1].dtype_policy == "float32"
    apply_policy(model, "float32", only=nn.Linear)
    assert types(model) == [FP32] * 4
    assert isinstance(model[0], nn.Linear)


def test_modules_that_cannot_have_a_policy() -> None:
    """Nothing of a model changes where one of its modules cannot have the policy."""
    attention = nn.MultiheadAttention(4, 2)
    for module, error, text, options in (
        (3, TypeError, "expected a torch.nn.Module, got 3", {}),
        (attention, ValueError, "reads the parameters of out_proj", {"only": nn.Linear}),
        (nn.ReLU(), ValueError, "has no module of only=", {"only": nn.Conv2d}),
    ):
        with pytest.raises(error, match=f"apply_policy: .*{text}"):
            apply_policy(module, "mixed_float16", **options)
    model = nn.Sequential(nn.Linear(4, 4), attention)
    with pytest.raises(ValueError, match="out_proj"):
        apply_policy(model, "mixed_float16", only=nn.Linear)
    assert type(model[0]) is nn.Linear
