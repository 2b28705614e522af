"""Test that a stopped training continues from its last checkpoint.

Gradients of one layer are sums of small integers, exact in any order, and AdamW's arithmetic is
elementwise: parameters are bit-equal on any number of processes. Overflows come from FP16 after the
scale has grown too far, and come at other steps if the scale is not restored.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import Tensor, distributed, nn

import amp_ext
from ranks import needs_gloo

STEPS, SAVED = 10, 5


def rank_of(
    rank: int, world: int, store: Path, timeout: int, function: Callable[..., None], *args: Any
) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(str(store), world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
    function(*args)
    distributed.barrier()
    distributed.destroy_process_group()


def start(world: int, timeout: int, folder: Path, function: Callable[..., None], *args: Any) -> Any:
    """Start processes that wait for each other for so many seconds."""
    store = folder / f"store {world} {function.__name__} {args}"
    given = (world, store, timeout, function, folder, *args)
    # The import runs once, in the parent of all forks.
    multiprocessing.set_forkserver_preload(
        ["torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "amp_ext"]
    )
    return torch.multiprocessing.start_processes(
        rank_of, given, nprocs=world, join=False, start_method="forkserver"
    )


def run(world: int, *args: Any) -> None:
    """Raise the error of a rank."""
    processes = start(world, 60, *args)
    while not processes.join():
        pass


# ---- a checkpoint --------------------------------------------------------------------------------


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


def saves(folder: Path) -> None:
    """Save a checkpoint, and record how training continued."""
    from torch.distributed import checkpoint

    training, world = Training(), distributed.get_world_size()
    training.steps(0, SAVED)
    checkpoint.save(training.state(), checkpoint_id=folder / f"{world}")
    training.steps(SAVED, STEPS)
    skips = [skipped for _, skipped, _ in training.seen]
    assert skips == [step % 3 == 1 and step > 1 for step in range(STEPS)]
    tensors = training.tensors()
    if distributed.get_rank() == 0:
        torch.save([tensors, training.seen[SAVED:]], folder / f"{world}.pt")
    continues(folder, world)


def continues(folder: Path, saved_by: int) -> None:
    training = Training()
    training.load(folder / f"{saved_by}")
    training.steps(SAVED, STEPS)
    tensors, seen = torch.load(folder / f"{saved_by}.pt")
    assert training.seen == seen
    for ours, theirs in zip(training.tensors(), tensors, strict=True):
        assert ours.equal(theirs)


@needs_gloo
def test_another_number_of_processes_continues(tmp_path: Path) -> None:
    """Training continues on another number of processes, and on the same number."""
    run(4, tmp_path, saves)
    run(2, tmp_path, continues, 4)


# ---- a process that ends in the middle of a step -------------------------------------------------


def waits_for_the_dead(folder: Path) -> None:
    training = Training()
    training.steps(0, 1)
    weight, scaler = training.model.weight.to_local(), training.scaler
    scaler.scale(training.model(torch.ones(2, 6)).sum()).backward()
    if distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    before, start = (weight.clone(), scaler.get_scale()), time.monotonic()
    with pytest.raises(RuntimeError) as error:
        scaler.step(training.optimizer)
    seconds = time.monotonic() - start
    assert weight.equal(before[0])
    assert scaler.get_scale() == before[1]
    torch.save(seconds, folder / f"{distributed.get_rank()}")
    raise error.value


@needs_gloo
def test_others_end_with_one_that_is_killed(tmp_path: Path) -> None:
    """If a process is killed before the scaler's reduction, the others raise after a timeout."""
    timeout = 10
    processes = start(3, timeout, tmp_path, waits_for_the_dead).processes
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [1, -signal.SIGKILL, 1]
    assert max(torch.load(tmp_path / f"{rank}") for rank in (0, 2)) < timeout + 1
