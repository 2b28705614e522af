"""Test that a stopped training goes on from a checkpoint, and that a failed step changes nothing.

Gradients of one layer are sums of small integers, exact in any order, and AdamW's arithmetic is
elementwise: parameters are bit-equal on any number of processes. Overflows come from FP16 after the
scale has grown too far, and come at other steps if the scale is not restored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import amp_ext
from ranks import Cases, needs_gloo, run

STEPS, SAVED = 10, 5
CASES_OF_4, CASES_OF_2 = (Cases(lambda world, folder: (folder,)) for _ in range(2))


class Training:
    def __init__(self) -> None:
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
        self.model = fully_shard(nn.Linear(6, 5, bias=False), mesh=mesh)
        self.optimizer = amp_ext.optim.AdamW(self.model.parameters(), 2.0**-5)
        self.scaler = amp_ext.GradScaler(
            "cpu", init_scale=2.0**12, growth_factor=8.0, backoff_factor=0.125, growth_interval=2
        )
        self.seen: list[Any] = []

    def steps(self, first: int, last: int) -> None:
        rank, world = distributed.get_rank(), distributed.get_world_size()
        for step in range(first, last):
            torch.manual_seed(step)
            x = torch.randint(-2, 3, (8, 6)).float().chunk(world)[rank]
            self.optimizer.zero_grad()
            with amp_ext.autocast("cpu", torch.float16):
                out = self.model(x)
            self.scaler.scale(out.float().sum() * world / 8).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            skips = self.scaler.step_was_skipped, self.scaler.get_skipped_steps()
            self.seen.append((self.scaler.state_dict(), *skips))

    def state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        scaler = self.scaler.state_dict()
        # Entries missing from the state are not loaded: a new scaler has counted nothing.
        counters = {"skipped_steps": 0, "hysteresis": 1, "hysteresis_tracker": 1}
        scaler.setdefault("amp_ext", counters)
        return {"model": model, "optimizer": optimizer, "scaler": scaler}

    def load(self, path: Path) -> None:
        from torch.distributed import checkpoint
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self.state()
        checkpoint.load(state, checkpoint_id=path)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.scaler.load_state_dict(state["scaler"])

    def tensors(self) -> list[Tensor]:
        of_optimizer = (value for its in self.optimizer.state.values() for value in its.values())
        tensors = [*self.model.parameters(), *of_optimizer]
        return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]


@CASES_OF_4.add
def saves(folder: Path) -> None:
    """Save a checkpoint, and record how training continued."""
    from torch.distributed import checkpoint

    training = Training()
    training.steps(0, SAVED)
    checkpoint.save(training.state(), checkpoint_id=folder / "saved")
    training.steps(SAVED, STEPS)
    skips = [skipped for _, skipped, _ in training.seen]
    assert skips == [step % 3 == 1 and step > 1 for step in range(STEPS)]
    tensors = training.tensors()
    if distributed.get_rank() == 0:
        torch.save([tensors, training.seen[SAVED:]], folder / "continued.pt")


@CASES_OF_4.add
@CASES_OF_2.add
def continues(folder: Path) -> None:
    training = Training()
    training.load(folder / "saved")
    training.steps(SAVED, STEPS)
    tensors, seen = torch.load(folder / "continued.pt")
    assert training.seen == seen
    for ours, theirs in zip(training.tensors(), tensors, strict=True):
        assert ours.equal(theirs)


@CASES_OF_2.add
def raises(folder: Path) -> None:
    """A reduction that fails, as after the death of a process, changes nothing."""

    def failing(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    training = Training()
    training.steps(0, 1)
    weight, scaler = training.model.weight.to_local(), training.scaler
    scaler.scale(training.model(torch.ones(2, 6)).sum()).backward()
    before = weight.clone(), training.model.weight.grad.to_local().clone(), scaler.get_scale()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="by peer"):
        patch.setattr(distributed, "all_reduce", failing)
        scaler.step(training.optimizer)
    assert weight.equal(before[0])
    assert training.model.weight.grad.to_local().equal(before[1])
    assert scaler.get_scale() == before[2]


@needs_gloo
def test_another_number_of_processes_continues(tmp_path: Path) -> None:
    """Training continues on another number of processes, and on the same number."""
    errors = [*run(__name__, 4, tmp_path, "CASES_OF_4"), *run(__name__, 2, tmp_path, "CASES_OF_2")]
    assert not any(errors), errors
