"""Test that steps of DTensors on two and four ranks equal one process's, bit for bit.

A step sends no message of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import ranks
from amp_ext import optim
from optim_cases import assert_same_bits, params_of

CASES = ranks.Cases(lambda world, folder: (world, folder))
LR = 0.01
F32, BF16 = torch.float32, torch.bfloat16
MASTERS = {"master_weights": True, "exp_avg_dtype": BF16}

if distributed.is_available():
    from torch.distributed import checkpoint as dcp
    from torch.distributed import init_device_mesh
    from torch.distributed.checkpoint import state_dict as names
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def everything(optimizer: torch.optim.Optimizer, of: Callable[[Tensor], Tensor]) -> list[Any]:
    """Return everything a step writes."""
    return [
        (
            of(param.detach()).clone(),
            {name: of(value).clone() for name, value in optimizer.state.get(param, {}).items()},
        )
        for group in optimizer.param_groups
        for param in group["params"]
    ]


def assert_same_wholes(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> None:
    assert_same_bits(everything(a, whole), everything(b, whole))


# ---- parameters with gradients of known numbers --------------------------------------------------


def placed_params(world: int, dtype: torch.dtype = F32) -> tuple[list[Tensor], list[Tensor]]:
    """Return DTensors of several meshes and placements, and the same parameters as wholes.

    Some are uneven or empty, and some are no DTensors.
    """
    line = init_device_mesh("cpu", (world,))
    square = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("a", "b"))
    spreads = {
        (8, 3): (line, [Shard(0)]),
        (5, 2): (line, [Shard(0)]),
        (1, 4): (line, [Shard(0)]),  # empty but on one rank
        (3, 9): (line, [Shard(1)]),
        (7,): (line, [Replicate()]),
        (): (line, [Replicate()]),
        (6, 4): (square, [Shard(0), Shard(1)]),
        (3, 5): (square, [Replicate(), Shard(0)]),
        (4,): None,
    }
    wholes = params_of(spreads, dtype)
    params = [
        nn.Parameter(distribute_tensor(param.detach(), *spread) if spread else param.detach())
        for param, spread in zip(params_of(spreads, dtype), spreads.values(), strict=True)
    ]
    return params, wholes


def set_grads(params: list[Tensor], wholes: list[Tensor], seed: int) -> None:
    numbers = params_of([param.shape for param in wholes], wholes[0].dtype, seed=1000 + seed)
    for param, same, number in zip(params, wholes, numbers, strict=True):
        same.grad = number.detach()
        param.grad = number.detach().clone()
        if isinstance(param, DTensor):
            param.grad = distribute_tensor(number.detach(), param.device_mesh, param.placements)


def train_both(ours: Any, same: Any, steps: range) -> None:
    [[params], [wholes]] = ([g["params"] for g in o.param_groups] for o in (ours, same))
    for seed in steps:
        set_grads(params, wholes, seed)
        same.step()
        with CommDebugMode() as sent:
            ours.step()
        assert sent.get_total_counts() == 0


def pair(world: int, kind: Any = optim.AdamW, dtype: torch.dtype = F32, **options: Any) -> Any:
    """An optimizer of DTensors and one of the same wholes."""
    return [kind(params, lr=LR, **options) for params in placed_params(world, dtype)]


def updates(world: int, folder: Path, kind: str, dtype: torch.dtype, options: Any) -> None:
    ours, same = pair(world, getattr(optim, kind), dtype, **options)
    assert ours._why_not() is None
    train_both(ours, same, range(3))
    assert_same_wholes(ours, same)
    for param, state in ours.state.items():
        for name, value in state.items():
            assert isinstance(value, DTensor) == (isinstance(param, DTensor) and name != "step")
            if isinstance(value, DTensor):
                assert (value.device_mesh, value.placements) == (
                    param.device_mesh,
                    param.placements,
                )


for kind, dtype, options in (
    ("AdamW", F32, {"amsgrad": True}),
    ("SGD", F32, {"momentum": 0.9, "dampening": 0.5}),
    ("SGD", F32, {}),
    ("AdamW", BF16, MASTERS),
    ("Adam", torch.float16, {"master_weights": True}),
):
    CASES.add(updates, kind, dtype, options)


@CASES.add
def gradients_and_states_placed_otherwise(world: int, folder: Path) -> None:
    """Gradients and states may have other placements, such as pending sums.

    Sequence parallelism leaves such sums.
    """
    mesh = init_device_mesh("cpu", (world,))
    ours, same = pair(world, **MASTERS, dtype=BF16)
    train_both(ours, same, range(2))
    for param, state in ours.state.items():
        if isinstance(param, DTensor) and param.device_mesh == mesh:
            for name in ("exp_avg", "master_param"):
                state[name] = state[name].redistribute(placements=[Replicate()])
    [[params], [wholes]] = ([g["params"] for g in o.param_groups] for o in (ours, same))
    set_grads(params, wholes, 2)
    for param, of_whole in zip(params, wholes, strict=True):
        if isinstance(param, DTensor) and param.device_mesh == mesh:
            mine = of_whole.grad if mesh.get_local_rank() == 1 else torch.zeros_like(of_whole)
            param.grad = DTensor.from_local(mine.clone(), mesh, [Partial()], run_check=False)
    for optimizer in (ours, same):
        optimizer.step()
    assert_same_wholes(ours, same)
    train_both(ours, same, range(3, 4))


def written(world: int, folder: Path, on_one_local: bool) -> None:
    """Assert that a parameter's master follows a write to the DTensor, or to one rank's part."""
    (param, *_, other, _, _, _, _), _ = placed_params(world, BF16)
    optimizer = optim.SGD([param, other], lr=1.0, master_weights=True)
    for each in (param, other):
        each.grad = torch.full_like(each, 2.0**-12)
    optimizer.step()
    before = local(other).clone()
    is_written = not on_one_local or distributed.get_rank() == 1
    with torch.no_grad():
        if is_written:
            (local(param) if on_one_local else param).add_(1)
    expected = local(param).float() - 2.0**-12
    optimizer.step()
    assert torch.equal(local(optimizer.state[param]["master_param"]), expected) == is_written
    kept = local(optimizer.state[other]["master_param"])
    assert not torch.equal(kept, before.float() - 2.0**-12)
    versions = param._version, local(param)._version
    optimizer.step()
    assert (param._version, local(param)._version) == (versions[0] + 1, versions[1] + 1)


for on_one_local in (False, True):
    CASES.add(written, on_one_local)


# ---- who makes a step ----------------------------------------------------------------------------


@CASES.add
def left_to_torch(world: int, folder: Path) -> None:
    """Sums that are still to be made, gradients on other meshes, and copies for autocast."""
    mesh = init_device_mesh("cpu", (world,))
    summed = nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False))
    summed.grad = torch.ones_like(summed)
    optimizer = optim.SGD([summed], lr=0.5)
    assert "(Partial)" in optimizer._kernels().why_not(optimizer.param_groups)
    twin = nn.Parameter(summed.detach().clone())
    twin.grad = summed.grad
    optimizer.step()
    torch.optim.SGD([twin], lr=0.5).step()
    assert_same_bits(whole(summed.detach()), whole(twin.detach()))

    params, _ = placed_params(world)
    params[0].grad = torch.ones_like(distribute_tensor(torch.ones(8, 3), params[6].device_mesh))
    refused = optim.SGD(params)
    assert "not a DTensor on the same mesh" in refused._kernels().why_not(refused.param_groups)
    set_grads(params, params, 0)
    optimizer = optim.SGD(params[::-1], lr=LR, momentum=0.5, autocast_copies=torch.float16)
    before = everything(optimizer, local)
    with pytest.raises(RuntimeError, match=r"a DTensor.* leave out autocast_copies"):
        optimizer.step()
    assert_same_bits(everything(optimizer, local), before)


# ---- checkpoints ---------------------------------------------------------------------------------


def block(dtype: torch.dtype) -> nn.Module:
    """Return layers with uneven shards, some with fewer rows than ranks."""
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4), nn.Linear(4, 1)
    return nn.Sequential(*layers).to(dtype)


def in_parts(world: int, dtype: torch.dtype, parts: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (world // parts, parts), mesh_dim_names=("copies", "parts"))
    return fully_shard(block(dtype), mesh=mesh)


def train(optimizer: torch.optim.Optimizer, steps: range) -> None:
    params = optimizer.param_groups[0]["params"]
    for seed in steps:
        wholes = [torch.empty(param.shape, dtype=param.dtype) for param in params]
        set_grads(params, wholes, seed)
        optimizer.step()


def adam(model: nn.Module, **options: Any) -> Any:
    return optim.Adam(model.parameters(), lr=LR, **options)


def save(model: nn.Module, optimizer: Any, path: Path) -> None:
    dcp.save(
        dict(zip("mo", names.get_state_dict(model, optimizer), strict=True)), checkpoint_id=path
    )


def load(model: nn.Module, optimizer: Any, path: Path) -> None:
    state = dict(zip("mo", names.get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=path)
    names.set_state_dict(model, optimizer, model_state_dict=state["m"], optim_state_dict=state["o"])


def expected(dtype: torch.dtype, options: dict[str, Any]) -> Any:
    """Return an optimizer after five steps of a single process."""
    optimizer = adam(block(dtype), **options)
    train(optimizer, range(5))
    return optimizer


def saved(world: int, folder: Path, dtype: torch.dtype, options: Any, by_two: bool) -> None:
    """Save by ranks that share parameters by two, or all of them; the others load."""
    parts = {True: 2, False: world}
    path = folder / f"{world}.{dtype}"
    models = [in_parts(world, dtype, parts[by]) for by in (by_two, not by_two)]
    before, after = (adam(model, **options) for model in models)
    train(before, range(2))
    save(models[0], before, path)
    load(models[1], after, path)
    assert_same_wholes(after, before)
    train(after, range(2, 5))
    assert_same_wholes(after, expected(dtype, options))


SAVED = ((F32, {"amsgrad": True}), (BF16, MASTERS))
for by_two, (dtype, options) in enumerate(SAVED):
    CASES.add(saved, dtype, options, bool(by_two))


# ---- the ranks -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def errors(folder: Path) -> dict[int, list[dict[str, str]]]:
    return {world: ranks.run(__name__, world, folder) for world in (4, 2)}


@ranks.needs_gloo
@pytest.mark.parametrize("world", [4, 2])
@pytest.mark.parametrize("name", CASES)
def test_ranks(name: str, world: int, errors: dict[int, list[dict[str, str]]]) -> None:
    assert [of_rank.get(name) for of_rank in errors[world]] == [None] * world


@ranks.needs_gloo
@pytest.mark.parametrize("world", [4, 2])
@pytest.mark.parametrize(("dtype", "options"), SAVED)
def test_saved_by_ranks(
    world: int, dtype: torch.dtype, options: Any, errors: Any, folder: Path
) -> None:
    """A state saved by ranks loads in one process."""
    model = block(dtype)
    optimizer = adam(model, **options)
    load(model, optimizer, folder / f"{world}.{dtype}")
    train(optimizer, range(2, 5))
    assert_same_wholes(optimizer, expected(dtype, options))
