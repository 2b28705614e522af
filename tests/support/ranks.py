"""Cases that processes connected by gloo run together."""

from __future__ import annotations

import importlib
import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

Case = Callable[[int, Path], None]


class Cases(dict[str, Case]):
    """By name. They are called in this order by each rank, with the number of ranks and a folder
    that they share."""

    def add(self, function: Callable[..., None], *args: Any) -> Callable[..., None]:
        """The case of a function that takes these arguments too. A decorator if there are none."""
        name = " ".join(getattr(each, "__name__", str(each)) for each in (function, *args))
        self[name] = lambda world, folder: function(world, folder, *args)
        return function


def run(module: str, world: int, folder: Path) -> list[dict[str, str]]:
    """Run ``CASES`` of a module on so many ranks. Returns each rank's tracebacks by case."""
    # Imported once, in a process from which ranks are forked.
    slow = ["torch.distributed.fsdp", "torch.distributed.checkpoint"]
    multiprocessing.set_forkserver_preload(slow)
    torch.multiprocessing.start_processes(
        _rank, (module, world, folder), nprocs=world, start_method="forkserver"
    )
    return [torch.load(folder / f"errors.{world}.{rank}") for rank in range(world)]


def _rank(rank: int, module: str, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / f"store.{world}"), world)
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    errors = {}
    for name, case in importlib.import_module(module).CASES.items():
        torch.manual_seed(0)
        try:
            case(world, folder)
        except BaseException:  # as errors of checkpoints are
            traceback.print_exc()  # should the others not come to an end
            errors[name] = traceback.format_exc()
    torch.save(errors, folder / f"errors.{world}.{rank}")
    distributed.destroy_process_group()
