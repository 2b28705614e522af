"""Test that programs of torch.jit.trace and torch.export run without amp_ext."""

from __future__ import annotations

import functools
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_ext

FP16 = torch.float16
KINDS = ["trace", "export", "strict export", "decomposed export"]
LOADS = """
import sys, torch
inputs, expected = torch.load("values")
for kind in sys.argv[1:]:
    model = torch.jit.load(kind) if kind == "trace" else torch.export.load(kind).module()
    assert model(*inputs).float().equal(expected), kind
assert not [name for name in sys.modules if name.startswith("amp_ext")]
"""


class Net(nn.Module):
    """A linear, a convolution of single pixels and a product, optionally in their own region."""

    def __init__(self, region: Any) -> None:
        super().__init__()
        self.linear, self.conv, self.region = nn.Linear(4, 4), nn.Conv2d(2, 4, 1), region
        for parameter in self.parameters():
            parameter.data = whole(*parameter.shape)

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        with self.region():
            hidden = self.linear(x) @ self.linear.weight
            return hidden + self.conv(image).flatten(2).sum(-1)


def whole(*shape: int) -> Tensor:
    """Return small whole numbers: their products are exact in every dtype."""
    return torch.randint(-2, 3, shape).float()


def save(model: Net, inputs: tuple[Tensor, ...], kind: str, path: Path) -> None:
    if kind == "trace":
        torch.jit.trace(model, inputs).save(path)
        return
    program = torch.export.export(model, inputs, strict=kind.startswith("strict"))
    if kind.startswith("decomposed"):
        program = program.run_decompositions()
    torch.export.save(program, path.with_suffix(".pt2"))
    path.with_suffix(".pt2").rename(path)


@pytest.mark.parametrize("place", ["within", "around"])
@pytest.mark.parametrize("name", ["amp_ext.autocast", "install"])
def test_programs_load_without_amp_ext(
    name: str, place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A saved program gives the model's result in a process with torch alone."""
    region = functools.partial(amp_ext.autocast, "cpu", FP16)
    if name == "install":
        amp_ext.install()
        request.addfinalizer(amp_ext.uninstall)
        region = functools.partial(torch.autocast, "cpu", FP16)
    within, around = (region, nullcontext) if place == "within" else (nullcontext, region)
    model, inputs = Net(within), (whole(3, 4), whole(3, 2, 3, 3))
    with around():
        torch.save((inputs, model(*inputs).detach().float()), tmp_path / "values")
        for kind in KINDS:
            save(model, inputs, kind, tmp_path / kind)
    command = [sys.executable, "-c", LOADS, *KINDS]
    subprocess.run(command, check=True, cwd=tmp_path)
