"""Test that steps of DTensors on two and four ranks equal one process's, bit for bit.

A step sends no message of its own.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed import init_device_mesh
from torch.distributed.checkpoint import state_dict as names
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._pytree import tree_map_only

import ranks
from amp_ext import optim
from optim_cases import assert_same_bits, params, params_of

CASES = ranks.Cases(lambda world, folder: (world, folder))
LR = 0.01
F32, BF16 = torch.float32, torch.bfloat16
MASTERS = {"master_weights": True, "exp_avg_dtype": BF16}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def wholes_of(optimizer: torch.optim.Optimizer) -> Any:
    """Return copies of everything a step writes."""
    written = [(param.detach(), optimizer.state.get(param, {})) for param in params(optimizer)]
    return tree_map_only(Tensor, lambda t: whole(t).clone(), written)


def assert_same_wholes(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> None:
    assert_same_bits(wholes_of(a), wholes_of(b))


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
    placed = [
        nn.Parameter(distribute_tensor(param.detach(), *spread) if spread else param.detach())
        for param, spread in zip(params_of(spreads, dtype), spreads.values(), strict=True)
    ]
    return placed, params_of(spreads, dtype)


def set_grads(optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Set gradients that are equal for equal seeds, spread as the parameters."""
    shapes = [param.shape for param in params(optimizer)]
    for param, number in zip(params(optimizer), params_of(shapes, seed=1000 + seed), strict=True):
        param.grad = number.detach().to(param.dtype)
        if isinstance(param, DTensor):
            param.grad = distribute_tensor(param.grad, param.device_mesh, param.placements)


def train(steps: range, *optimizers: Any) -> None:
    for seed in steps:
        for optimizer in optimizers:
            set_grads(optimizer, seed)
            with CommDebugMode() as sent:
                optimizer.step()
            assert sent.get_total_counts() == 0


def pair(world: int, kind: Any = optim.AdamW, dtype: torch.dtype = F32, **options: Any) -> Any:
    """An optimizer of DTensors and one of the same wholes."""
    return [kind(params, lr=LR, **options) for params in placed_params(world, dtype)]


def updates(world: int, folder: Path, kind: str, dtype: torch.dtype, options: Any) -> None:
    ours, same = pair(world, getattr(optim, kind), dtype, **options)
    assert ours._why_not() is None
    train(range(3), ours, same)
    assert_same_wholes(ours, same)
    for param, state in ours.state.items():
        for name, value in state.items():
            assert isinstance(value, DTensor) == (isinstance(param, DTensor) and name != "step")
            if isinstance(value, DTensor):
                assert value.device_mesh == param.device_mesh
                assert value.placements == param.placements


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
    train(range(2), ours, same)
    for param, state in ours.state.items():
        if isinstance(param, DTensor) and param.device_mesh == mesh:
            for name in ("exp_avg", "master_param"):
                state[name] = state[name].redistribute(placements=[Replicate()])
    for optimizer in (ours, same):
        set_grads(optimizer, 2)
    for param, of_whole in zip(params(ours), params(same), strict=True):
        if isinstance(param, DTensor) and param.device_mesh == mesh:
            mine = of_whole.grad if mesh.get_local_rank() == 1 else torch.zeros_like(of_whole)
            param.grad = DTensor.from_local(mine.clone(), mesh, [Partial()], run_check=False)
    for optimizer in (ours, same):
        optimizer.step()
    assert_same_wholes(ours, same)
    train(range(3, 4), ours, same)


def written(world: int, folder: Path, on_one_local: bool) -> None:
    """Assert that a parameter's master follows a write to the DTensor, or to one rank's part."""
    (param, *_, other, _, _, _, _), _ = placed_params(world, BF16)
    optimizer = optim.SGD([param, other], lr=1.0, master_weights=True)
    for each in (param, other):
        each.grad = torch.full_like(each, 2.0**-12)
    optimizer.step()
    before = other.to_local().clone()
    is_written = not on_one_local or distributed.get_rank() == 1
    with torch.no_grad():
        if is_written:
            (param.to_local() if on_one_local else param).add_(1)
    expected = param.to_local().float() - 2.0**-12
    optimizer.step()
    mine, kept = (optimizer.state[p]["master_param"].to_local() for p in (param, other))
    assert torch.equal(mine, expected) == is_written
    assert not torch.equal(kept, before.float() - 2.0**-12)
    versions = [each._version + 1 for each in (param, param.to_local())]
    optimizer.step()
    assert [each._version for each in (param, param.to_local())] == versions


for on_one_local in (False, True):
    CASES.add(written, on_one_local)


# ---- who makes a step ----------------------------------------------------------------------------


@CASES.add
def left_to_torch(world: int, folder: Path) -> None:
    """torch's code steps sums that are still to be made, and gradients on other meshes."""
    mesh = init_device_mesh("cpu", (world,))
    summed = nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False))
    summed.grad = torch.ones_like(summed)
    optimizer = optim.SGD([summed], lr=0.5)
    assert "(Partial)" in optimizer._kernel_step.why_not(optimizer.param_groups)
    twin = nn.Parameter(summed.detach().clone())
    twin.grad = summed.grad
    optimizer.step()
    torch.optim.SGD([twin], lr=0.5).step()
    assert_same_bits(whole(summed.detach()), whole(twin.detach()))

    placed, _ = placed_params(world)
    placed[0].grad = torch.ones_like(distribute_tensor(torch.ones(8, 3), placed[6].device_mesh))
    refused = optim.SGD(placed)
    assert "not a DTensor on the same mesh" in refused._kernel_step.why_not(refused.param_groups)


# ---- checkpoints ---------------------------------------------------------------------------------


def adam(world: int, dtype: torch.dtype, options: Any, parts: int = 1) -> tuple[nn.Module, Any]:
    """Return layers and their optimizer; some parts have fewer rows than others, or none."""
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4), nn.Linear(4, 1)
    model = nn.Sequential(*layers).to(dtype)
    if parts > 1:
        mesh = init_device_mesh("cpu", (world // parts, parts), mesh_dim_names=("copies", "parts"))
        fully_shard(model, mesh=mesh)
    return model, optim.Adam(model.parameters(), lr=LR, **options)


def load(model: nn.Module, optimizer: Any, path: Path) -> None:
    state = dict(zip("mo", names.get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=path)
    names.set_state_dict(model, optimizer, model_state_dict=state["m"], optim_state_dict=state["o"])


def assert_goes_on(optimizer: Any, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Assert that three more steps lead to the fifth of a single process."""
    _, expected = adam(1, dtype, options)
    train(range(5), expected)
    train(range(2, 5), optimizer)
    assert_same_wholes(optimizer, expected)


def saved(world: int, folder: Path, dtype: torch.dtype, options: Any, by_two: bool) -> None:
    """Save by ranks that share parameters by two, or all of them; the others load."""
    model, before = adam(world, dtype, options, 2 if by_two else world)
    other, after = adam(world, dtype, options, world if by_two else 2)
    train(range(2), before)
    path = folder / f"{world}.{dtype}"
    dcp.save(dict(zip("mo", names.get_state_dict(model, before), strict=True)), checkpoint_id=path)
    load(other, after, path)
    assert_same_wholes(after, before)
    assert_goes_on(after, dtype, options)


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


@pytest.mark.parametrize("world", [4, 2])
@pytest.mark.parametrize("name", CASES)
def test_ranks(name: str, world: int, errors: dict[int, list[dict[str, str]]]) -> None:
    assert [of_rank.get(name) for of_rank in errors[world]] == [None] * world


@pytest.mark.parametrize("world", [4, 2])
@pytest.mark.parametrize(("dtype", "options"), SAVED)
def test_saved_by_ranks(
    world: int, dtype: torch.dtype, options: Any, errors: Any, folder: Path
) -> None:
    """A state saved by ranks loads in one process."""
    model, optimizer = adam(1, dtype, options)
    load(model, optimizer, folder / f"{world}.{dtype}")
    assert_goes_on(optimizer, dtype, options)
