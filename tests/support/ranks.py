"""Cases that two processes of torch.distributed run together, all in one spawn."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

RANKS = 2
needs_ranks = pytest.mark.skipif(
    not distributed.is_available(), reason="this torch is built without gloo"
)


class Cases(dict[str, Callable[[Any], None]]):
    """A module's CASES: what each rank calls with a mesh of all."""

    def add(self, function: Callable[..., None], *args: Any) -> Callable[..., None]:
        """As a decorator, or once for each set of arguments behind the mesh."""
        name = " ".join([function.__name__, *map(str, args)])
        self[name] = lambda mesh: function(mesh, *args)
        return function


def errors_of_ranks(module: str, folder: Path) -> list[dict[str, str]]:
    """Run the CASES of a test module; return of each rank the tracebacks of those that failed."""
    torch.multiprocessing.spawn(_run, (module, str(folder)), nprocs=RANKS)
    return [torch.load(folder / str(rank)) for rank in range(RANKS)]


def _run(rank: int, module: str, folder: str) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", RANKS)
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    mesh = distributed.init_device_mesh("cpu", (RANKS,))
    errors = {}
    for name, case in importlib.import_module(module).CASES.items():
        torch.manual_seed(0)
        try:
            case(mesh)
        except Exception:
            errors[name] = traceback.format_exc()
    torch.save(errors, f"{folder}/{rank}")
    distributed.destroy_process_group()
