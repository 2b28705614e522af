"""Test that the short programs of docs run as they are printed."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import amp_ext

ROOT = Path(__file__).parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def programs(page: str) -> list[str]:
    """Return the Python blocks of a file, for the device of this machine."""
    text = (ROOT / page).read_text().replace('"cuda"', f'"{DEVICE}"')
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


class Layers(nn.Sequential):
    @property
    def layers(self) -> list[nn.Module]:
        return list(self)


def names() -> dict[str, Any]:
    """Return what the pages take for granted: a model with its optimizer, scaler and batches."""
    model = Layers(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).to(DEVICE)
    optimizer = amp_ext.optim.SGD(model.parameters(), lr=0.1)
    batches = [(torch.ones(4, 8, device=DEVICE), torch.zeros(4, 8, device=DEVICE))] * 4
    return {
        "torch": torch,
        "amp_ext": amp_ext,
        "fully_shard": fully_shard,
        "MixedPrecisionPolicy": MixedPrecisionPolicy,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "scaler": amp_ext.GradScaler(DEVICE),
        "batches": batches,
        "loader": batches,
        "loss_of": nn.functional.mse_loss,
        "loss_fn": nn.functional.mse_loss,
        "loss": nn.functional.mse_loss(model(batches[0][0]), batches[0][1]),
    }


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    amp_ext.uninstall()


@pytest.fixture
def one_rank() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


PAGES = ["autocast", "distributed", "migrating", "optimizers", "scaler"]
NEEDS_A_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")


@pytest.mark.parametrize(
    "page", [*PAGES, pytest.param("graphs", id="graphs_cuda", marks=NEEDS_A_GPU)]
)
def test_programs_run(one_rank: None, page: str) -> None:
    """Each program of a page runs and leaves finite weights."""
    for program in programs(f"docs/{page}.md"):
        known = names()
        exec(program, known)
        parameters = [p for group in known["optimizer"].param_groups for p in group["params"]]
        assert all(p.isfinite().all() for p in parameters)


def test_the_example_of_an_op_is_right() -> None:
    """The reference in docs/add-an-op.md agrees with the op; the kernel is the one of the op."""
    reference, kernel, _ = programs("docs/add-an-op.md")
    known = {**vars(amp_ext.ops.lists), "op": lambda *written: lambda op: op}
    known["cases"] = lambda op: lambda function: function
    exec(reference, known)
    for case in known["_check_finite_cases"]():
        grads = case.arguments["grads"]
        flags = [torch.zeros(()) for _ in range(2)]
        known["check_finite"](grads, flags[0])
        amp_ext.ops.check_finite(grads, flags[1])
        assert flags[0] == flags[1], case.what
    assert kernel in (ROOT / "triton_kernels/lists/check_finite.py").read_text()


def test_both_readmes_have_one_program() -> None:
    """docs/zh/README.md has the program of README.md, with other comments."""
    english, chinese = (programs(name) for name in ("README.md", "docs/zh/README.md"))
    assert [re.sub(r"#.*", "", text) for text in english] == [
        re.sub(r"#.*", "", text) for text in chinese
    ]
