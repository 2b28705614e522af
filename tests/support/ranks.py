"""Cases that several processes run together, in one spawn."""

from __future__ import annotations

import importlib
import traceback
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed


def errors_of(module: str, world: int, folder: Path) -> dict[str, list[str]]:
    """Runs ``CASES[world]`` of a module, functions by name, on so many ranks of gloo, one after the
    other. What went wrong, by case; a case that leaves a rank alone is an error on all of them."""
    torch.multiprocessing.spawn(_rank_of, (world, module, str(folder)), nprocs=world)
    errors = [torch.load(folder / str(rank)) for rank in range(world)]
    return {name: [of[name] for of in errors if name in of] for name in set().union(*errors)}


def _rank_of(rank: int, world: int, module: str, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(f"{folder}/store", world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    errors = {}
    for name, run in importlib.import_module(module).CASES[world].items():
        torch.manual_seed(0)
        try:
            run()
            distributed.barrier()
        except Exception:
            errors[name] = traceback.format_exc()
    torch.save(errors, f"{folder}/{rank}")
    distributed.destroy_process_group()
