"""cast_weights_together: from its second time on, a region casts all its weights in one launch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import amp_ext
from autocast_cases import LOW, Seen

FP16, BF16 = LOW
ONE = {dtype: torch.eye(4, dtype=dtype) for dtype in LOW}
X = ONE[FP16]


@pytest.fixture(autouse=True)
def together() -> Iterator[None]:
    amp_ext.cast_weights_together()
    yield
    amp_ext.cast_weights_together(False)


def layers(count: int) -> nn.Sequential:
    """Linear layers of small whole numbers: products are exact in every dtype."""
    net = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(count)))
    for layer in net:
        layer.weight.data = torch.randint(-1, 2, (4, 4)).float()
    return net


def forward(net: nn.Module, dtype: torch.dtype = FP16) -> Tensor:
    with amp_ext.autocast("cpu", dtype=dtype):
        return net(ONE[dtype])


def casts(call: Callable[[], object]) -> tuple[int, int]:
    """How many launches cast several tensors, and how many one."""
    with torch.profiler.profile(record_shapes=True) as profile:
        call()
    seen = [(event.key, event.input_shapes[:1]) for event in profile.events()]
    alone = [shape for key, shape in seen if key == "aten::_to_copy"]
    # An empty tensor tells whether torch has cleared its cache.
    return [key for key, _ in seen].count("amp_ext::cast_"), len(alone) - alone.count([[0]])


def is_cast_early(first: nn.Module, layer: nn.Linear) -> bool:
    """Whether a region that begins with one layer casts the weight of another: it does not see then
    what `.data` writes behind torch's back."""
    with amp_ext.autocast("cpu", dtype=FP16):
        first(X)
        layer.weight.data.add_(1)
        result = layer(X)
        layer.weight.data.sub_(1)
    return result.equal(layer.weight.t().half())


def test_off_by_default() -> None:
    """So that what is written behind autograd's back before a weight's first use is seen."""
    amp_ext.cast_weights_together(False)
    net = layers(3)
    assert [casts(lambda: forward(net)) for _ in range(3)] == [(0, 3)] * 3
    assert not is_cast_early(net[0], net[1])


@pytest.mark.parametrize("dtype", LOW, ids=["fp16", "bf16"])
def test_one_launch_from_the_second_region_on(dtype: torch.dtype) -> None:
    net = layers(23).append(nn.Conv2d(4, 4, 1, bias=False))
    call = lambda: forward_with_conv(net, dtype)  # noqa: E731
    assert casts(call) == (0, 24)
    assert [casts(call) for _ in range(3)] == [(1, 0)] * 3


def forward_with_conv(net: nn.Sequential, dtype: torch.dtype) -> Tensor:
    with amp_ext.autocast("cpu", dtype=dtype):
        return net[-1](net[:-1](ONE[dtype])[..., None, None])


@pytest.mark.parametrize("grad", [True, False])
def test_results_and_gradients_are_the_same(grad: bool) -> None:
    net, results = layers(5), []
    for _ in range(3):
        net.zero_grad()
        with torch.set_grad_enabled(grad):
            out = forward(net)
        if grad:
            out.sum().backward()
        results.append([out, *(w.grad for w in net.parameters() if grad)])
        with torch.no_grad():
            for weight in net.parameters():
                weight.neg_()
    for later in results[1:]:
        for i, (one, other) in enumerate(zip(results[0], later, strict=True)):
            assert one.dtype == (torch.float32 if i else FP16)
            assert one.abs().equal(other.abs())


def test_a_weight_that_is_not_used_drops_out() -> None:
    net = layers(5)
    forward(net)
    assert is_cast_early(net[0], net[1])  # and the other three are not used
    assert is_cast_early(net[0], net[1])
    assert not is_cast_early(net[0], net[2])


def test_regions_that_begin_alike_take_turns() -> None:
    net = layers(6)
    for _ in range(3):
        forward(net)
        forward(net[:2])
    assert casts(lambda: forward(net)) == (2, 0)
    assert casts(lambda: forward(net[:2])) == (1, 0)
    assert not is_cast_early(net[0], net[3])


def test_two_models_take_turns() -> None:
    """Each region begins with a weight of its own."""
    generator, critic = layers(4), layers(3)

    def step() -> None:
        forward(critic)
        forward(nn.Sequential(generator, critic))

    step()
    step()
    assert casts(lambda: forward(critic)) == (1, 0)
    assert casts(lambda: forward(nn.Sequential(generator, critic))) == (2, 0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    """Each repeats a part of the region in one of its own."""
    net = layers(9)

    def step(parts: int) -> list[Tensor]:
        net.zero_grad()
        x = X.clone().requires_grad_()
        with amp_ext.autocast("cpu", dtype=FP16):
            for i in range(0, 9, 9 // parts):
                part = net[i : i + 9 // parts]
                x = checkpoint(part, x, use_reentrant=reentrant) if parts > 1 else part(x)
        x.sum().backward()
        return [weight.grad for weight in net.parameters()]

    expected = step(1)
    for _ in range(3):
        for actual, wanted in zip(step(3), expected, strict=True):
            assert actual.equal(wanted)
    assert casts(lambda: step(3)) == (6, 0)


def set_data(weight: Tensor) -> None:
    weight.data = weight.data + 1


def fused_sgd(weight: Tensor) -> None:
    """Writes without a new version; the scaler clears the copies for that."""
    scaler = amp_ext.GradScaler("cpu", enabled=False)
    weight.grad = -torch.ones_like(weight)
    scaler.step(torch.optim.SGD([weight], lr=1.0, fused=True))


WRITES: dict[str, Callable[[Tensor], object]] = {
    "add_": lambda w: w.add_(1),
    ".data =": set_data,
    "fused SGD": fused_sgd,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_weight_written_before_its_first_use(write: Callable[[Tensor], object]) -> None:
    net = layers(3)
    forward(net)
    with amp_ext.autocast("cpu", dtype=FP16):
        net[0](X)
        with torch.no_grad():
            write(net[2].weight)
        assert net[2](X).equal(net[2].weight.t().half())


def freeze(weight: Tensor) -> None:
    weight.requires_grad_(False)


def widen(weight: Tensor) -> None:
    weight.data = weight.data.double()


def free(weight: Tensor) -> None:
    weight.untyped_storage().resize_(0)


def expand(weight: Tensor) -> None:
    weight.data = torch.ones(1, 4).expand(4, 4)


@pytest.mark.parametrize("change", [freeze, widen, free, expand])
def test_weight_that_has_changed_since(change: Callable[[Tensor], None]) -> None:
    """The others are cast in one launch as before."""
    net = layers(4)
    forward(net)
    change(net[1].weight)
    rest = nn.Sequential(net[0], *net[2:])
    assert casts(lambda: forward(rest)) == (1, 0)


def test_weights_are_not_kept_alive() -> None:
    net = layers(3)
    forward(net)
    gone = [weakref.ref(weight) for weight in net.parameters()]
    del net[1:]
    gc.collect()
    assert [weak() is None for weak in gone] == [False, True, True]
    forward(net)


def test_every_dtype_has_its_own() -> None:
    net = layers(3)
    forward(net, FP16)
    assert casts(lambda: forward(net, BF16)) == (0, 3)
    assert casts(lambda: forward(net, FP16)) == (1, 0)


def test_a_mode_sees_each_cast() -> None:
    net = layers(3)
    for _ in range(2):
        with Seen() as seen:
            forward(net)
        assert (seen.casts, seen.gemms) == (3, 3)


def test_without_a_cache() -> None:
    net = layers(3)

    def call() -> None:
        with amp_ext.autocast("cpu", dtype=FP16, cache_enabled=False):
            net(X)

    forward(net)
    assert casts(call) == (0, 3)


def test_transforms() -> None:
    """Their weights are wrapped: torch casts them."""
    net = layers(3)
    forward(net)
    params = dict(net.named_parameters())

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        with amp_ext.autocast("cpu", dtype=FP16):
            return torch.func.functional_call(net, params, (x,)).float().sum()

    x = torch.eye(4)[None].expand(2, 4, 4)
    grads: Any = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x)
    loss(params, x[0]).backward()
    for name, weight in params.items():
        assert grads[name][1].equal(weight.grad)
