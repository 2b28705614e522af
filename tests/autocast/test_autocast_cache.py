"""Test that autocast casts weights once per version, and only elements in use, and frees copies."""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import amp_ext
from autocast_cases import LOW, Seen

FP16, BF16 = LOW

# Products of an input [2, 4] with a weight [4, 4] ...
LEAF_USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "mm": lambda x, w: x.mm(w),
}
# ... and with views of it.
VIEW_USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "w.t()": lambda x, w: x @ w.t(),
    "w.reshape": lambda x, w: F.conv2d(x[:, :, None, None], w.reshape(4, 4, 1, 1)),
    "w.unsqueeze": lambda x, w: x[None].bmm(w.unsqueeze(0)),
    "w.expand": lambda x, w: x.expand(3, 2, 4).bmm(w.expand(3, 4, 4)),
}
USES = LEAF_USES | VIEW_USES
every_use = pytest.mark.parametrize("use", USES.values(), ids=USES)


def whole(*shape: int) -> Tensor:
    """Small whole numbers: products are exact in every dtype."""
    return torch.randint(-3, 4, shape).float()


@pytest.fixture
def x() -> Tensor:
    return whole(2, 4)


@pytest.fixture
def weight() -> Tensor:
    return whole(4, 4).requires_grad_()


UPDATES: list[Callable[[Tensor], object]] = [
    lambda w: w.neg_(),
    lambda w: w.t()[1].add_(1),
    lambda w: w.detach().add_(1),
    lambda w: torch._foreach_add_([w], 1.0),
    lambda w: setattr(w, "data", w.data + 1),
]


class Program:
    """A program of one weight, and the copies that the cache should keep of it.

    Attributes:
        updates: the number of updates of the weight.
        kept: the number of updates before the kept copy was made, by the copy's dtype.
        regions: the entered ones, with their dtypes, and whether they keep copies.
    """

    def __init__(self, chance: random.Random, weight: Tensor) -> None:
        self.chance, self.weight = chance, weight
        self.updates, self.kept = 0, dict[torch.dtype, int]()
        self.regions: list[tuple[Any, torch.dtype, bool]] = []

    def enter(self, kinds: Sequence[Any] = (amp_ext.autocast, torch.autocast)) -> None:
        dtype, keeps = self.chance.choice(LOW), self.chance.random() < 0.8
        region = self.chance.choice(kinds)("cpu", dtype, cache_enabled=keeps)
        region.__enter__()
        self.regions.append((region, dtype, keeps))

    def leave(self) -> None:
        self.regions.pop()[0].__exit__(None, None, None)
        if not self.regions:
            self.kept.clear()

    def clear(self) -> None:
        torch.clear_autocast_cache()
        self.kept.clear()

    def update(self) -> None:
        self.updates += 1
        with torch.no_grad():
            self.chance.choice(UPDATES)(self.weight)

    def freeze_or_release(self) -> None:
        self.weight.requires_grad_(not self.weight.requires_grad)

    def use(self) -> None:
        """Compare a result, its gradient and the number of casts with the right ones."""
        name, x, weight = self.chance.choice([*USES]), whole(2, 4), self.weight
        mode = self.chance.choice((torch.enable_grad, torch.no_grad, torch.inference_mode))
        if not any(isinstance(region, amp_ext.autocast) for region, *_ in self.regions):
            self.enter([amp_ext.autocast])
        _, dtype, keeps = self.regions[-1]
        low = x.to(dtype)
        with mode(), Seen() as seen:
            result = USES[name](low, weight)
        if mode is torch.inference_mode:
            pass  # neither keeps a copy nor takes one; its casts are not seen
        elif keeps and name in LEAF_USES and weight.requires_grad:
            assert seen.casts == (self.kept.get(dtype) != self.updates)
            self.kept[dtype] = self.updates
        else:
            assert seen.casts == 1
        with torch.autocast("cpu", enabled=False), torch.enable_grad():
            expected = USES[name](x, weight)
        assert result.equal(expected.to(dtype))
        assert result.requires_grad == (mode is torch.enable_grad and weight.requires_grad)
        if result.requires_grad:
            grads = [torch.autograd.grad(r.sum(), weight)[0] for r in (result, expected)]
            assert grads[0].equal(grads[1])


@pytest.mark.parametrize("seed", range(20))
def test_any_program(weight: Tensor, seed: int) -> None:
    """Each use has the weight's value, and a cast if the cache has no copy of it.

    Copies last until the outermost region ends, for each dtype. Views have no copies.
    """
    program = Program(random.Random(seed), weight)
    actions = [program.enter, program.leave, program.update, program.freeze_or_release]
    try:
        for _ in range(100):
            action = program.chance.choice([*actions, program.clear, *6 * [program.use]])
            if action != program.leave or program.regions:
                action()
    finally:
        while program.regions:
            program.leave()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("enabled", [True, False], ids=["scaled", "disabled scaler"])
def test_step_within_the_region(fused: bool, enabled: bool) -> None:
    """The first convolution's copy is torch's own; the copies of later layers are amp_ext's."""
    x, target = torch.rand(2, 3, 6, 6), torch.rand(2, 1)

    def trained(region_per_step: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(64, 1, bias=False)
        )
        scaler = amp_ext.GradScaler("cpu", init_scale=2.0**10, enabled=enabled)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, fused=fused)
        with contextlib.nullcontext() if region_per_step else fp16():
            for _ in range(3):
                optimizer.zero_grad()
                with fp16() if region_per_step else contextlib.nullcontext():
                    loss = (net(x).float() - target).square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        return list(net.parameters())

    for actual, expected in zip(trained(False), trained(True), strict=True):
        assert actual.equal(expected)


def fp16(**options: bool) -> Any:
    return amp_ext.autocast("cpu", dtype=FP16, **options)


def test_activations_are_not_kept(x: Tensor, weight: Tensor) -> None:
    """The cache holds no tensor that is not a leaf."""
    with fp16():
        operand = 1 * weight
        F.linear(x, operand)
        gone = weakref.ref(operand)
        del operand
        assert gone() is None


@pytest.fixture
def graph_owned(weight: Tensor) -> Iterator[Tensor]:
    """Return a weight in memory owned by CUDA graphs of torch.compile."""
    torch._C._set_cached_tensors_enabled(True)
    torch._C._add_cached_tensor(weight)
    yield weight
    torch._C._remove_cached_tensor(weight)
    torch._C._set_cached_tensors_enabled(False)


@pytest.mark.parametrize("region", [torch.autocast, amp_ext.autocast])
def test_memory_of_cuda_graphs_is_cast_at_every_use(
    x: Tensor, graph_owned: Tensor, region: Any
) -> None:
    """A replay of a graph changes a weight without a new version."""
    with region("cpu", FP16), Seen() as seen:
        for _ in range(3):
            F.linear(x.half(), graph_owned)
    assert seen.casts == 3 + 3


class Copies(TorchDispatchMode):
    """Record the addresses that conversions write, without keeping the memory alive.

    Attributes:
        elements: the number of elements that they write.
    """

    def __init__(self) -> None:
        super().__init__()
        self.memory: list[StorageWeakRef] = []
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.memory.append(StorageWeakRef(result.untyped_storage()))
            self.elements += result.numel()
        return result

    def alive(self) -> list[bool]:
        return [not memory.expired() for memory in self.memory]


def test_copies_go_with_the_region(x: Tensor, weight: Tensor) -> None:
    """A copy is freed when its weight changes, when the cache is cleared, and with the region."""
    low = x.half()
    with Copies() as copies:
        with fp16():
            F.linear(low, weight)
            assert copies.alive() == [True]
            with torch.no_grad():
                weight.add_(1)
            F.linear(low, weight)
            assert copies.alive() == [False, True]
            torch.clear_autocast_cache()
            assert copies.alive() == [False, False]
            F.linear(low, weight)
        assert copies.alive() == 3 * [False]


@pytest.mark.parametrize("grad", [True, False])
@every_use
def test_new_weight_at_an_old_address(x: Tensor, use: Any, grad: bool) -> None:
    """A weight dies with the region, and a new one of its version may take its address before."""
    low, gone = x.half(), []
    with torch.set_grad_enabled(grad), fp16():
        for _ in range(50):
            weight = nn.Parameter(whole(4, 4))
            with torch.autocast("cpu", enabled=False):
                expected = use(x, weight).half()
            assert use(low, weight).equal(expected)
            gone.append(weakref.ref(weight))
            del weight, expected
    assert [weak() for weak in gone] == 50 * [None]


def test_new_memory_at_an_old_address(x: Tensor, weight: Tensor) -> None:
    """A weight's new memory may take the address of memory that the weight gave up."""
    low = x.half()
    with torch.no_grad(), fp16():
        for value in range(20):
            F.linear(low, weight)
            address = weight.untyped_storage()._cdata
            for _ in range(9):
                weight.data = torch.full((4, 4), float(value))
                if weight.untyped_storage()._cdata == address:
                    break
            assert F.linear(low, weight).equal(low @ weight.half().t())


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    ("product", "count"),
    [
        (lambda x, table: F.linear(x[0, 0], table[:10]), 8 + 40),
        (lambda x, table: x @ table[:20].view(5, 1, 4, 4), 24 + 80),
    ],
    ids=["a part", "expanded"],
)
def test_an_operand_is_cast_without_what_the_product_does_not_use(
    product: Any, count: int, grad: bool
) -> None:
    """A part of a large weight is cast alone, and an expanded operand before it is expanded."""
    x, table = (torch.ones(s, requires_grad=grad) for s in ((1, 3, 2, 4), (1000, 4)))
    with fp16(), Copies() as copies:
        product(x, table)
    assert copies.elements == count


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_freed_operand(dtype: torch.dtype, grad: bool) -> None:
    """An operand whose storage has been freed is an error."""
    weight = torch.ones(3, 4, dtype=dtype, requires_grad=grad)
    weight.untyped_storage().resize_(0)
    for use in (F.linear, amp_ext.ops.linear):
        with fp16(), pytest.raises(RuntimeError, match=r"needs a storage of \d+ bytes"):
            use(torch.ones(2, 4), weight)


def test_parameter_made_in_inference_mode() -> None:
    """A parameter without a version is cast."""
    with torch.inference_mode():
        weight = nn.Parameter(torch.ones(3, 4))
    with torch.no_grad(), fp16():
        assert F.linear(torch.ones(2, 4), weight).eq(4).all()
