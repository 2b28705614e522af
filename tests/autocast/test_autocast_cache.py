"""Test that autocast casts weights once per version, and only elements in use, and frees copies."""

import contextlib
import functools
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import amp_ext
from autocast_cases import LOW, Seen
from cases import assert_all_same

FP16 = torch.float16
fp16 = functools.partial(amp_ext.autocast, "cpu", FP16)

# Products of an input [2, 4] with a weight [4, 4], and with views of it.
LEAF_USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "mm": torch.mm,
}
USES = LEAF_USES | {
    "w.t()": lambda x, w: x @ w.t(),
    "w.reshape": lambda x, w: F.conv2d(x[:, :, None, None], w.reshape(4, 4, 1, 1)),
    "w.unsqueeze": lambda x, w: x[None].bmm(w.unsqueeze(0)),
    "w.expand": lambda x, w: x.expand(3, 2, 4).bmm(w.expand(3, 4, 4)),
}


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


@pytest.mark.parametrize("seed", range(20))
def test_any_program(weight: Tensor, seed: int) -> None:
    """Each use has the weight's value, and a cast if the cache has no copy of it.

    Copies last until the outermost region ends, for each dtype. Views have no copies.
    """
    chance = random.Random(seed)
    regions: list[tuple[Any, torch.dtype, bool]] = []  # with dtypes, and whether they keep copies
    kept: set[torch.dtype] = set()

    def enter(*kinds: Any) -> None:
        dtype, keeps = chance.choice(LOW), chance.random() < 0.8
        regions.append((chance.choice(kinds)("cpu", dtype, cache_enabled=keeps), dtype, keeps))
        regions[-1][0].__enter__()

    try:
        for _ in range(100):
            match chance.randrange(11):
                case 0:
                    enter(amp_ext.autocast, torch.autocast)
                case 1 if regions:
                    regions.pop()[0].__exit__(None, None, None)
                case 2:
                    kept.clear()
                    with torch.no_grad():
                        chance.choice(UPDATES)(weight)
                case 3:
                    weight.requires_grad_(not weight.requires_grad)
                case 4:
                    kept.clear()
                    torch.clear_autocast_cache()
                case _:
                    if not any(isinstance(region, amp_ext.autocast) for region, *_ in regions):
                        enter(amp_ext.autocast)
                    use_once(chance, weight, *regions[-1][1:], kept)
            if not regions:
                kept.clear()
    finally:
        while regions:
            regions.pop()[0].__exit__(None, None, None)


def use_once(
    chance: random.Random, weight: Tensor, dtype: torch.dtype, keeps: bool, kept: set[torch.dtype]
) -> None:
    """Compare a result, its gradient and the number of casts with the right ones."""
    name, x = chance.choice([*USES]), whole(2, 4)
    mode = chance.choice((torch.enable_grad, torch.no_grad, torch.inference_mode))
    low = x.to(dtype)
    with mode(), Seen() as seen:
        result = USES[name](low, weight)
    if mode is torch.inference_mode:
        pass  # neither keeps a copy nor takes one; its casts are not seen
    elif keeps and name in LEAF_USES and weight.requires_grad:
        assert seen.casts == (dtype not in kept)
        kept.add(dtype)
    else:
        assert seen.casts == 1
    with torch.autocast("cpu", enabled=False), torch.enable_grad():
        expected = USES[name](x, weight)
    assert result.equal(expected.to(dtype))
    assert result.requires_grad == (mode is torch.enable_grad and weight.requires_grad)
    if result.requires_grad:
        grads = [torch.autograd.grad(r.sum(), weight)[0] for r in (result, expected)]
        assert grads[0].equal(grads[1])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("enabled", [True, False], ids=["scaled", "disabled scaler"])
def test_step_within_the_region(fused: bool, enabled: bool) -> None:
    """The first convolution's copy is torch's own; the copies of later layers are amp_ext's."""
    x, target = torch.rand(2, 3, 6, 6), torch.rand(2, 1)
    trained = []
    for around, within in ((fp16, contextlib.nullcontext), (contextlib.nullcontext, fp16)):
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(64, 1, bias=False)
        net = nn.Sequential(*layers)
        scaler = amp_ext.GradScaler("cpu", init_scale=2.0**10, enabled=enabled)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, fused=fused)
        with around():
            for _ in range(3):
                optimizer.zero_grad()
                with within():
                    loss = (net(x).float() - target).square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        trained.append(net.parameters())
    assert_all_same(*trained)


@pytest.mark.parametrize("region", [torch.autocast, amp_ext.autocast])
def test_memory_of_cuda_graphs_is_cast_at_every_use(
    x: Tensor, weight: Tensor, region: Any, request: pytest.FixtureRequest
) -> None:
    """A replay of a CUDA graph of torch.compile changes a weight without a new version."""
    torch._C._set_cached_tensors_enabled(True)
    request.addfinalizer(lambda: torch._C._set_cached_tensors_enabled(False))
    torch._C._add_cached_tensor(weight)
    request.addfinalizer(lambda: torch._C._remove_cached_tensor(weight))
    with region("cpu", FP16), Seen() as seen:
        for _ in range(3):
            F.linear(x.half(), weight)
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
    """A copy is freed when its weight changes, when the cache is cleared, and with the region.

    Copies of tensors that are no leaves are freed at once.
    """
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
            F.linear(low, 1 * weight)
            assert copies.alive() == 3 * [False]
            F.linear(low, weight)
        assert copies.alive() == 4 * [False]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
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
    with fp16(), pytest.raises(RuntimeError, match=r"needs a storage of \d+ bytes"):
        F.linear(torch.ones(2, 4), weight)


def test_parameter_made_in_inference_mode() -> None:
    """A parameter without a version is cast."""
    with torch.inference_mode():
        weight = nn.Parameter(torch.ones(3, 4))
    with torch.no_grad(), fp16():
        assert F.linear(torch.ones(2, 4), weight).eq(4).all()
