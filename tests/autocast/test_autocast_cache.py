"""Test that autocast casts weights once per version and dtype, and drops the copies in time."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
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
every_dtype = pytest.mark.parametrize("dtype", LOW, ids=["fp16", "bf16"])

# Products of an input [2, 4] with a weight [4, 4] ...
LEAF_USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "mm": lambda x, w: x.mm(w),
}
# ... and with views of it.
VIEW_USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "w.t()": lambda x, w: x @ w.t(),
    "w.mT": lambda x, w: x @ w.mT,
    "w.view": lambda x, w: x[:, :2] @ w.view(2, 8),
    "w.reshape": lambda x, w: F.conv2d(x[:, :, None, None], w.reshape(4, 4, 1, 1)),
    "rows of w": lambda x, w: F.linear(x, w[1:]),
    "w.unsqueeze": lambda x, w: x[None].bmm(w.unsqueeze(0)),
    "w.expand": lambda x, w: x.expand(3, 2, 4).bmm(w.expand(3, 4, 4)),
    "view of a view": lambda x, w: x @ w.view(2, 2, 4).view(4, 4).t(),
}
USES = LEAF_USES | VIEW_USES
every_use = pytest.mark.parametrize("use", USES.values(), ids=USES)
every_leaf_use = pytest.mark.parametrize("use", LEAF_USES.values(), ids=LEAF_USES)


def whole(*shape: int) -> Tensor:
    """Small whole numbers: products are exact in every dtype."""
    return torch.randint(-3, 4, shape).float()


@pytest.fixture
def x() -> Tensor:
    return whole(2, 4)


@pytest.fixture
def weight() -> Tensor:
    return whole(4, 4).requires_grad_()


@pytest.mark.parametrize("grad", [True, False])
@every_dtype
@every_leaf_use
def test_cast_once(x: Tensor, weight: Tensor, dtype: torch.dtype, use: Any, grad: bool) -> None:
    low, expected = x.to(dtype), use(x, weight).to(dtype)
    with torch.set_grad_enabled(grad), amp_ext.autocast("cpu", dtype=dtype), Seen() as seen:
        for _ in range(3):
            assert use(low, weight).equal(expected)
    assert (seen.gemms, seen.casts) == (3, 1)


@every_use
def test_grad_mode_may_change(x: Tensor, weight: Tensor, use: Any) -> None:
    low = x.half()
    with amp_ext.autocast("cpu", dtype=FP16):
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad, torch.no_grad):
            with mode():
                assert use(low, weight).requires_grad == torch.is_grad_enabled()
        use(low, weight).sum().backward()
    actual, weight.grad = weight.grad, None
    use(x, weight).sum().backward()
    assert actual.equal(weight.grad)


def test_weight_may_be_frozen_and_released(x: Tensor, weight: Tensor) -> None:
    with amp_ext.autocast("cpu", dtype=FP16):
        for requires_grad in (True, False, True):
            weight.requires_grad_(requires_grad)
            result = F.linear(x, weight)
            assert result.requires_grad == requires_grad
    result.sum().backward()
    assert weight.grad.equal(x.sum(0).expand(4, 4))


UPDATES: dict[str, Callable[[Tensor], object]] = {
    "mul_": lambda w: w.mul_(2),
    "view of it": lambda w: w.t()[1].add_(1),
    "detached": lambda w: w.detach().add_(1),
    "_foreach_add_": lambda w: torch._foreach_add_([w], 1.0),
}


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
@pytest.mark.parametrize(
    "use", [F.linear, *list(VIEW_USES.values())[:5:4]], ids=["linear", *list(VIEW_USES)[:5:4]]
)
def test_update_in_place_is_seen(x: Tensor, weight: Tensor, use: Any, update: Any) -> None:
    x = x.abs() + 1  # so that a change of the weight changes the result
    low = x.half()
    with amp_ext.autocast("cpu", dtype=FP16):
        for _ in range(2):
            before = use(low, weight)
            with torch.no_grad():
                update(weight)
            after = use(low, weight)
            with torch.autocast("cpu", enabled=False):
                assert after.equal(use(x, weight).half())
            assert not after.equal(before)
            with Seen() as seen:
                use(low, weight)
            assert seen.casts == (use in VIEW_USES.values())


def fused_sgd(weight: Tensor, value: Tensor) -> None:
    weight.grad = weight.detach() - value
    torch.optim.SGD([weight], lr=1.0, fused=True).step()


SILENT_WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "fused SGD": fused_sgd,
    ".data =": lambda w, value: setattr(w, "data", value),
    "NumPy": lambda w, value: w.detach().numpy().__setitem__(slice(None), value.numpy()),
}
"""What gives a weight another value, but no other version."""


@pytest.mark.parametrize("write", SILENT_WRITES.values(), ids=SILENT_WRITES)
@pytest.mark.parametrize("use", [VIEW_USES["w.t()"], VIEW_USES["w.reshape"]], ids=["mm", "conv2d"])
def test_views_are_fresh_after_a_silent_write(
    x: Tensor, weight: Tensor, use: Any, write: Any
) -> None:
    """Views are cast at each use, as in torch: the cache keeps no copy of a view."""
    low, value = x.half(), whole(4, 4) + 8
    with fp16():
        use(low, weight).sum().backward()
        version = weight._version
        write(weight, value)
        assert weight._version == version
        assert use(low, weight).equal(use(x, value).half())


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


@every_use
def test_every_dtype_has_its_copy(x: Tensor, use: Any) -> None:
    """Each dtype has its own copy: 1 + 2**-9 is a number of fp16, but not of bf16."""
    weight = torch.full((4, 4), 1 + 2.0**-9).requires_grad_()
    inputs = {dtype: torch.eye(4)[:2].to(dtype) for dtype in LOW}
    with Seen() as seen, amp_ext.autocast("cpu", dtype=FP16):
        for dtype in (FP16, BF16, FP16, BF16):
            with amp_ext.autocast("cpu", dtype=dtype):
                result = use(inputs[dtype], weight)
            assert result.dtype == dtype
            assert result.max() == torch.tensor(1 + 2.0**-9, dtype=dtype)
    assert seen.casts == (4 if use in VIEW_USES.values() else 2)


def fp16(**options: bool) -> Any:
    return amp_ext.autocast("cpu", dtype=FP16, **options)


def test_where_copies_are_made(x: Tensor, weight: Tensor) -> None:
    """Copies last until the outermost region ends, unless the cache is cleared or off."""
    low = x.half()
    with Seen() as twice:
        for _ in range(2):
            with fp16():
                F.linear(low, weight)
    with Seen() as within_torchs, torch.autocast("cpu", dtype=FP16):
        for _ in range(3):
            with fp16():
                F.linear(low, weight)
    with Seen() as cleared, fp16():
        for _ in range(3):
            F.linear(low, weight)
            torch.clear_autocast_cache()
    with Seen() as without, fp16(cache_enabled=False):
        for _ in range(3):
            F.linear(low, weight)
    with Seen() as without_inside, fp16():
        F.linear(low, weight)
        with fp16(cache_enabled=False):
            F.linear(low, weight)
            F.linear(low, weight)
        F.linear(low, weight)
    seen = (twice, within_torchs, cleared, without, without_inside)
    assert [each.casts for each in seen] == [2, 1, 3, 3, 3]


def test_leaving_an_inner_region_keeps_the_copies(x: Tensor, weight: Tensor) -> None:
    low = x.half()
    with Seen() as seen, fp16():
        for region in (fp16(), torch.autocast("cpu", dtype=FP16), fp16()):
            F.linear(low, weight)
            with region:
                F.linear(low, weight)
    assert (seen.gemms, seen.casts) == (6, 1)


@pytest.mark.parametrize("kind", ["activation", "frozen", "input"])
def test_what_is_no_weight_is_not_kept(x: Tensor, weight: Tensor, kind: str) -> None:
    other = {"activation": lambda: 1 * weight, "frozen": weight.detach, "input": weight.clone}[kind]
    with torch.set_grad_enabled(kind == "activation"), fp16():
        operand = other()
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
    """Record the addresses that conversions write, without keeping the memory alive."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.memory.append(StorageWeakRef(result.untyped_storage()))
        return result

    def alive(self) -> list[bool]:
        return [not memory.expired() for memory in self.memory]


@every_leaf_use
def test_copies_go_with_the_region(x: Tensor, weight: Tensor, use: Any) -> None:
    low = x.half()
    with Copies() as copies:
        with fp16():
            use(low, weight)
            assert copies.alive() == [True]
            torch.clear_autocast_cache()
            assert copies.alive() == [False]
            use(low, weight)
            assert copies.alive() == [False, True]
        assert copies.alive() == [False, False]


@every_use
def test_copy_of_an_old_value_is_not_kept(x: Tensor, weight: Tensor, use: Any) -> None:
    low = x.half()
    with Copies() as copies, fp16():
        for _ in range(4):
            use(low, weight)
            with torch.no_grad():
                weight.add_(1)
        assert sum(copies.alive()) <= 1


@pytest.mark.parametrize("grad", [True, False])
@every_use
def test_weights_do_not_outlive_the_region(x: Tensor, use: Any, grad: bool) -> None:
    gone = []
    with torch.set_grad_enabled(grad), fp16():
        for _ in range(3):
            weight = nn.Parameter(whole(4, 4))
            use(x, weight)
            gone.append(weakref.ref(weight))
            del weight
    assert [weak() for weak in gone] == 3 * [None]


@every_use
def test_new_weight_at_an_old_address(x: Tensor, use: Any) -> None:
    """A new weight of the same version may take the address of a weight that died in the region."""
    low = x.half()
    with torch.no_grad(), fp16():
        for _ in range(50):
            weight = nn.Parameter(whole(4, 4))
            with torch.autocast("cpu", enabled=False):
                expected = use(x, weight).half()
            assert use(low, weight).equal(expected)
            del weight


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
