"""Test the scaler across processes: parameters of one process, and one decision everywhere.

Inputs and weights are small integers, learning rates and scales powers of two, so that all sums of
the few steps are exact: without a clip, parameters are bit-equal. The coefficient of a clip may
differ by the roundings of a norm, 2**-23; three steps multiply it less than a thousandfold.
"""

import copy
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed import fsdp
from torch.distributed import get_rank as rank
from torch.distributed import get_world_size as world
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import amp_ext.optim
from amp_ext.compat.apex import amp
from ranks import DEVICE, Cases, on_ranks
from twins import OURS, started

CASES = Cases(lambda *_: ())  # for four ranks
LR, SCALE = 2.0**-5, 8.0


def integers(*shape: int) -> Tensor:
    return torch.randint(-2, 3, shape).float().to(DEVICE)


# ---- whole trainings -----------------------------------------------------------------------------


class Net(nn.Module):
    """A network of three outputs, so that some of four ranks have no shard of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 3)
        for param in self.parameters():
            param.data = integers(*param.shape)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(self.fc2(self.fc1(x).relu()).relu())


def fsdp1(use_orig_params: bool, net: nn.Module, offload: bool = False) -> nn.Module:
    wrap = functools.partial(
        FullyShardedDataParallel,
        use_orig_params=use_orig_params,
        cpu_offload=fsdp.CPUOffload(offload_params=offload),
        device_id=torch.device(DEVICE),
    )
    net.fc1, net.fc2 = wrap(net.fc1), wrap(net.fc2)
    return wrap(net)


def fsdp2(net: nn.Module, mesh: Any = None) -> nn.Module:
    for layer in (net.fc1, net.fc2, net.fc3, net):
        fully_shard(layer, mesh=mesh)
    return net


def hsdp(net: nn.Module) -> nn.Module:
    """Each pair of ranks has a replica."""
    return fsdp2(net, distributed.init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "shard")))


WRAPPERS = {
    "ddp": nn.parallel.DistributedDataParallel,
    "fsdp1": functools.partial(fsdp1, False),
    "fsdp1_orig_params": functools.partial(fsdp1, True),
    "fsdp1_offload": functools.partial(fsdp1, True, offload=True),
    "fsdp2": fsdp2,
    "hsdp": hsdp,
}


OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=LR, momentum=0.5),
    "adamw": functools.partial(torch.optim.AdamW, lr=LR, fused=True),
    "our_adamw": functools.partial(amp_ext.optim.AdamW, lr=LR),
}
sgd = OPTIMIZERS["sgd"]

WAYS: dict[str, Callable[..., Any]] = {
    "step": lambda scaler, optimizer, net: None,
    "unscale": lambda scaler, optimizer, net: scaler.unscale_(optimizer),
    "clip": lambda scaler, optimizer, net: scaler.clip_grad_norm_(optimizer, 8.0),
    "clip_parameters": lambda scaler, optimizer, net: scaler.clip_grad_norm_(net.parameters(), 8.0),
}


def first_grad(net: nn.Module) -> Tensor | None:
    """Return the first gradient with a shard in this process."""
    grads = (param.grad for param in net.parameters() if param.grad is not None)
    locals_ = (grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads)
    return next((grad for grad in locals_ if grad.numel()), None)


def steps(
    net: nn.Module, make: str, way: str, x: Tensor, share: float, spoils: bool
) -> tuple[list[Any], list[float], list[int]]:
    """Run three steps; return each step's state, norms and number of communications.

    The loss is this share of the sum of the outputs. The second step may be spoilt here.
    """
    optimizer = OPTIMIZERS[make](net.parameters())
    scaler = amp_ext.GradScaler(DEVICE, init_scale=SCALE)
    seen, norms, counts = [], [], []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(net(x).float().sum() * share).backward()
        if step == 1 and spoils:
            first_grad(net).view(-1)[0] = torch.inf
        with CommDebugMode() as mode:
            norm = WAYS[way](scaler, optimizer, net)
            scaler.step(optimizer)
            scaler.update()
        counts.append(mode.get_total_counts())
        seen.append((scaler.get_scale(), scaler.step_was_skipped, scaler.get_skipped_steps()))
        if norm is not None:
            assert math.isfinite(norm) == (step != 1)
            norms.append(float(norm) if step != 1 else 0.0)
    return seen, norms, counts


def whole_parameters(net: nn.Module) -> list[Tensor]:
    if isinstance(net, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(net, writeback=False):
            return [param.detach().clone() for param in net.parameters()]
    params = [param.detach() for param in net.parameters()]
    return [param.full_tensor() if hasattr(param, "full_tensor") else param for param in params]


def trains_as_one(wrapper: str, make: str, way: str) -> None:
    """An overflow in the shard of one process skips the step in all."""
    net, x = Net(), integers(8, 4)
    alone = copy.deepcopy(net)
    net = WRAPPERS[wrapper](net)
    spoils = wrapper == "ddp" or rank() == world() - 1  # DDP's gradients are equal everywhere
    seen, norms, counts = steps(net, make, way, x.chunk(world())[rank()], 1.0, spoils)
    expected, expected_norms, _ = steps(alone, make, way, x, 1 / world(), True)
    assert seen == expected
    assert norms == pytest.approx(expected_norms, rel=2**-13)
    assert [skipped for _, skipped, _ in seen] == [False, True, False]
    assert counts == [0 if wrapper == "ddp" else 1] * 3
    tolerance = 0.0 if make == "sgd" and not way.startswith("clip") else 2.0**-13
    for ours, theirs in zip(whole_parameters(net), whole_parameters(alone), strict=True):
        torch.testing.assert_close(ours.to(DEVICE), theirs, rtol=tolerance, atol=tolerance)


for wrapper in WRAPPERS:
    if DEVICE == "cuda" and not wrapper.startswith(("ddp", "fsdp1")):
        continue  # gloo would read CUDA tensors as if they were the CPU's
    if DEVICE == "cpu" and wrapper == "fsdp1_offload":
        continue  # from the CPU
    programs = [("sgd", "step"), ("sgd", "clip"), ("our_adamw", "clip")]
    if wrapper in ("fsdp1_orig_params", "fsdp2"):
        programs += [("sgd", "unscale"), ("sgd", "clip_parameters"), ("our_adamw", "step")]
    if wrapper == "fsdp2":
        programs += [("adamw", "step"), ("adamw", "clip")]
    for program in programs:
        CASES.add(trains_as_one, wrapper, *program)


# ---- lists of gradients --------------------------------------------------------------------------


def placed(tensor: Tensor, mesh: Any, *placements: Any) -> Tensor:
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)  # all ranks have it


def with_grads(grads: list[Tensor | None], like: list[Tensor]) -> torch.optim.Optimizer:
    params = [nn.Parameter(torch.zeros_like(tensor)) for tensor in like]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return torch.optim.SGD(params, LR, foreach=False)  # it takes DTensors with plain tensors


def found(optimizer: torch.optim.Optimizer) -> tuple[list[float], int]:
    """Return the norm of a clip, whether the step is skipped, and the number of communications."""
    scaler = started(OURS, SCALE, device=DEVICE)
    with CommDebugMode() as mode:
        norm = scaler.clip_grad_norm_(optimizer, 1e6)
    scaler.step(optimizer)
    scaler.update()
    return [float(norm) * SCALE, scaler.step_was_skipped], mode.get_total_counts()


@CASES.add
def mixed_list() -> None:
    """A list of DTensors with several meshes and placements, uneven and empty shards, and plain
    tensors takes one launch each and one reduction, and counts each element once.
    """
    flat = distributed.init_device_mesh(DEVICE, (4,))
    square = distributed.init_device_mesh(DEVICE, (2, 2))
    wholes = [integers(*shape) for shape in [(5, 3), (3,), (4, 6), (2, 2), (7,), (4,), (3, 3)]]
    places = [
        (flat, Shard(0)),
        (flat, Shard(0)),
        (square, Shard(0), Shard(1)),
        (square, Replicate(), Shard(1)),
        (square, Replicate(), Replicate()),
        (square, Shard(0), Replicate()),
    ]
    like = [placed(whole, *place) for whole, place in zip(wholes, places, strict=False)]
    optimizer = with_grads([*like, wholes[6]], [*like, wholes[6]])
    expected = math.sqrt(sum(float(whole.double().square().sum()) for whole in wholes))
    (norm, skipped), count = found(optimizer)
    assert float(norm) == pytest.approx(expected, rel=2**-22)
    assert (skipped, count) == (False, 1)

    # Autograd has left the sum over processes undone: it is infinite only afterwards.
    big = torch.full((4,), 2.0**127, device=DEVICE)
    param = placed(big, square, Replicate(), Replicate())
    grad = DTensor.from_local(big, square, [Replicate(), Partial()], run_check=False)
    optimizer = with_grads([grad], [param])
    (norm, skipped), count = found(optimizer)
    assert (norm, skipped) == (math.inf, True)
    grad = DTensor.from_local(wholes[5], square, [Replicate(), Partial()], run_check=False)
    (norm, skipped), _ = found(with_grads([grad], [param]))
    assert norm == pytest.approx(2 * float(wholes[5].norm()), rel=2**-22)


@CASES.add
def experts() -> None:
    """Each pair of processes has its own experts with norms of their own, and all processes skip
    together.
    """
    flat = distributed.init_device_mesh(DEVICE, (4,))
    pairs = distributed.init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("ep", "shard"))["shard"]
    dense, expert = torch.ones(4, device=DEVICE), torch.full((2,), 2.0 + rank() // 2, device=DEVICE)
    grads = [placed(dense, flat, Shard(0)), placed(expert, pairs, Shard(0))]
    (norm, skipped), count = found(with_grads(grads, grads))
    assert norm == pytest.approx(math.sqrt(4 + 2 * expert[0] ** 2), rel=2**-22)
    assert (skipped, count) == (False, 2)  # one for each set of processes
    if rank() == 3:
        grads[1].to_local().fill_(torch.nan)
    assert found(with_grads(grads, grads))[0][1]


@CASES.add
def rank_without_gradients() -> None:
    """A rank without gradients takes part in the reduction.

    If no rank has any, all raise the error.
    """
    mesh = distributed.init_device_mesh(DEVICE, (world(),))
    for value in (1.0, torch.inf):
        grad = placed(torch.full((8,), value, device=DEVICE), mesh, Shard(0))
        optimizer = with_grads([None if rank() == 0 else grad], [grad])
        (norm, skipped), count = found(optimizer)
        assert (skipped, count) == (value == torch.inf, 1)
        assert norm == pytest.approx(value * math.sqrt(8 - 8 // world()))
    optimizer = with_grads([None], [grad])
    scaler = started(OURS, SCALE, device=DEVICE)
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(optimizer)


@CASES.add
def process_group() -> None:
    """With process_group=, parameters without visible sharding skip together.

    They do so with a norm as well, and norms stay local. An optimizer without parameters, and one
    under DDP, joins the reduction; a process outside the group does not.
    """
    first = distributed.new_group([0])
    ones = torch.ones(4, device=DEVICE)
    inside = with_grads([ones * (torch.nan if rank() == 1 else 1)], [ones])
    reduced = nn.parallel.DistributedDataParallel(nn.Linear(2, 2).to(DEVICE))
    reduced(torch.ones(2, 2, device=DEVICE)).sum().backward()
    empty = sgd([{"params": []}])
    for group, optimizer, skips in (
        (distributed.group.WORLD, inside, True),
        (distributed.group.WORLD, inside if rank() == 1 else empty, True),
        (distributed.group.WORLD, inside if rank() == 1 else sgd(reduced.parameters()), True),
        (first, inside, rank() == 1),
    ):
        scaler = started(OURS, SCALE, device=DEVICE, process_group=group)
        with CommDebugMode() as mode:
            scaler.step(optimizer)
        scaler.update()
        assert mode.get_total_counts() == (group is not first or rank() == 0)
        assert (scaler.step_was_skipped, scaler.get_scale()) == (skips, SCALE / (1 + skips))

    everywhere = {"process_group": distributed.group.WORLD, "device": DEVICE}
    scaler = started(OURS, SCALE, skip_above_norm=3.0, **everywhere)
    for largest, skips in ((4.0, True), (1.0, False)):
        optimizer = with_grads([ones * SCALE * (largest if rank() == 1 else 1.0)], [ones])
        norm = scaler.clip_grad_norm_(optimizer, 100.0)
        assert norm == 2 * (largest if rank() == 1 else 1)
        scaler.step(optimizer)
        scaler.update()
        assert (scaler.step_was_skipped, scaler.get_scale()) == (skips, SCALE)


@CASES.add
def stages_of_shards() -> None:
    """An overflow in one shard of a stage reaches every shard of the other stage."""
    mesh = distributed.init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("stage", "shard"))
    grad = placed(torch.ones(4, device=DEVICE), mesh["shard"], Shard(0))
    if rank() == 3:
        grad.to_local().fill_(torch.nan)
    scaler = started(OURS, SCALE, device=DEVICE, process_group=mesh.get_group("stage"))
    scaler.step(with_grads([grad], [grad]))
    scaler.update()
    assert scaler.step_was_skipped


@CASES.add
def gradients_dropped_meanwhile() -> None:
    """Gradients dropped by another thread during the reduction do not disturb the write."""
    mesh = distributed.init_device_mesh(DEVICE, (world(),))
    grads = [placed(torch.full((8,), 2 * SCALE, device=DEVICE), mesh, Shard(0)) for _ in range(99)]
    optimizer = with_grads(grads, grads)
    part = grads[0].to_local()
    del grads
    all_reduce = distributed.all_reduce

    def dropping(*args: Any, **kwargs: Any) -> Any:
        optimizer.zero_grad()
        return all_reduce(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "all_reduce", dropping)
        scaler = started(OURS, SCALE, device=DEVICE)
        norm = scaler.clip_grad_norm_(optimizer, 1.0)
    expected = 2 * math.sqrt(8 * 99)
    assert float(norm) == pytest.approx(expected, rel=2**-22)
    torch.testing.assert_close(part, torch.full_like(part, 2 / expected))


@CASES.add
def sum_over_processes() -> None:
    """torch's scaler unscales a parameter that is a sum over processes, and its gradient."""
    mesh = distributed.init_device_mesh(DEVICE, (world(),))
    param = nn.Parameter(DTensor.from_local(torch.ones(4, device=DEVICE), mesh, [Partial()]))
    param.grad = DTensor.from_local(torch.full((4,), SCALE, device=DEVICE), mesh, [Partial()])
    scaler = started(OURS, SCALE, device=DEVICE)
    scaler.unscale_(torch.optim.SGD([param], LR))
    assert torch.equal(param.grad.to_local(), torch.ones(4, device=DEVICE))


@CASES.add
def fsdp1_without_shards() -> None:
    """The clip of FSDP1 without shards is refused before anything is written."""
    for orig in (False, True):
        net = FullyShardedDataParallel(
            nn.Linear(4, 4),
            sharding_strategy=fsdp.ShardingStrategy.NO_SHARD,
            use_orig_params=orig,
            device_id=torch.device(DEVICE),
        )
        optimizer = sgd(net.parameters())
        scaler = amp_ext.GradScaler(DEVICE, init_scale=SCALE)
        scaler.scale(net(torch.ones(2, 4, device=DEVICE)).sum()).backward()
        before = [param.grad.clone() for param in net.parameters()]
        with pytest.raises(RuntimeError, match="NO_SHARD"):
            scaler.clip_grad_norm_(optimizer, 1.0)
        for param, grad in zip(net.parameters(), before, strict=True):
            assert torch.equal(param.grad, grad)
        scaler.unscale_(optimizer)
        expected = torch.cat([grad.flatten() / SCALE for grad in before]).norm()
        torch.testing.assert_close(net.clip_grad_norm_(1.0), expected)


@CASES.add
def fsdp1_of_one_element() -> None:
    """One process has the only element, and the others padding."""
    layer = nn.Linear(1, 1, bias=False)
    net = FullyShardedDataParallel(layer, device_id=torch.device(DEVICE))
    scaler = amp_ext.GradScaler(DEVICE, init_scale=SCALE)
    scaler.scale(net(torch.ones(2, 1, device=DEVICE)).sum()).backward()
    assert scaler.clip_grad_norm_(sgd(net.parameters()), 1.0).item() == 2.0


# ---- Apex's amp ----------------------------------------------------------------------------------


def train_by_apex(
    model: nn.Module, data: list[Tensor], opt_level: str, bucket_view: bool | None
) -> dict[str, Any]:
    """Train with two losses a step, whose gradients add up; return the state of the scales."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    if bucket_view is not None:
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
    for step in range(4):
        optimizer.zero_grad()
        for i, x in enumerate(data):
            loss = model(x).square().mean()
            if (step, i) == (2, 0) and (bucket_view is None or rank() == 1):
                loss = loss * torch.inf
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
    return amp.state_dict()


def apex_trains_as_one(opt_level: str, bucket_view: bool) -> None:
    """Ranks of the same data train bit for bit as one process, an overflow included."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).to(DEVICE)
    alone, data = copy.deepcopy(model), [torch.randn(4, 8, device=DEVICE) for _ in range(2)]
    state = train_by_apex(alone, data, opt_level, None)
    assert state["loss_scaler0"] == {"loss_scale": 2.0**15, "unskipped": 3}
    assert train_by_apex(model, data, opt_level, bucket_view) == state
    for param, its in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(param, its)


for options in itertools.product(("O1", "O2"), (False, True)):
    CASES.add(apex_trains_as_one, *options)


errors, test_on_ranks = on_ranks(__name__, CASES, 4, DEVICE)
