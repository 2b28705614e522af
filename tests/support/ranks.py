"""Cases that processes connected by gloo run together."""

import importlib
import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def mesh_of_all(world: int, folder: Path) -> tuple[Any]:
    return (distributed.init_device_mesh("cpu", (world,)),)


class Cases(dict[str, Callable[[int, Path], None]]):
    """Collect cases by name. Each rank calls them in this order.

    Args:
        first: from the number of ranks and a folder that they share, the first arguments of each
            case's function.
    """

    def __init__(self, first: Callable[[int, Path], tuple[Any, ...]]) -> None:
        super().__init__()
        self.first = first

    def add(self, function: Callable[..., None], *args: Any) -> Callable[..., None]:
        """The case of a function that takes these arguments too. A decorator if there are none."""
        name = " ".join(getattr(each, "__name__", str(each)) for each in (function, *args))
        self[name] = lambda world, folder: function(*self.first(world, folder), *args)
        return function


def run(module: str, world: int, folder: Path, cases: str = "CASES") -> list[dict[str, str]]:
    """Run cases of a module on so many ranks. Returns each rank's tracebacks by case."""
    # The import runs once, in the parent of all forks.
    slow = ["torch.distributed.fsdp", "torch.distributed.checkpoint"]
    multiprocessing.set_forkserver_preload(slow)
    torch.multiprocessing.start_processes(
        _rank, (module, world, folder, cases), nprocs=world, start_method="forkserver"
    )
    return [torch.load(folder / f"errors.{world}.{rank}") for rank in range(world)]


def on_ranks(module: str, cases: Cases, world: int, device: str = "cpu") -> tuple[Any, Any]:
    """Return a fixture that runs a module's cases on so many ranks, and a test of each case."""

    @pytest.fixture(scope="module", name="errors")
    def errors_of(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
        return run(module, world, tmp_path_factory.mktemp("ranks"))

    @pytest.mark.parametrize("device", [device])
    @pytest.mark.parametrize("name", cases)
    def test(name: str, device: str, errors: list[dict[str, str]]) -> None:
        assert [of_rank.get(name) for of_rank in errors] == [None] * world

    return errors_of, test


def _rank(rank: int, module: str, world: int, folder: Path, cases: str) -> None:
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    store = distributed.FileStore(str(folder / f"store.{world}"), world)
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    errors: dict[str, str] = {}
    for name, case in getattr(importlib.import_module(module), cases).items():
        if errors:  # other ranks may still wait for this one
            errors[name] = "not run: a case before it has failed"
            continue
        torch.manual_seed(0)
        try:
            case(world, folder)
            distributed.barrier()
        except BaseException:  # as errors of checkpoints are
            traceback.print_exc()  # in case the others hang
            errors[name] = traceback.format_exc()
    torch.save(errors, folder / f"errors.{world}.{rank}")
    distributed.destroy_process_group()
