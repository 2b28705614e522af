"""amp_ext.autocast has the effect of torch.autocast; importing amp_ext changes nothing in torch."""

from __future__ import annotations

import contextlib
import inspect
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import amp_ext

x = torch.ones(2, 4)
square = torch.ones(4, 4)
batch = torch.ones(3, 4, 4)
image = torch.ones(1, 4, 5, 5)

# Of every kind: run in the lower precision, run in fp32, promote to the widest, and left alone.
# `low` is in the lower precision.
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda low: F.linear(x, square),
    "mm": lambda low: x.mm(square),
    "addmm": lambda low: torch.addmm(x, x, square),
    "matmul": lambda low: x.matmul(square),
    "__matmul__": lambda low: x @ square,
    "bmm": lambda low: batch.bmm(batch),
    "baddbmm": lambda low: torch.baddbmm(batch, batch, batch),
    "addbmm": lambda low: torch.addbmm(square, batch, batch),
    "conv2d": lambda low: F.conv2d(image, torch.ones(6, 4, 1, 1)),
    "conv_transpose2d": lambda low: F.conv_transpose2d(image, torch.ones(4, 6, 1, 1)),
    "mse_loss": lambda low: F.mse_loss(low, x),
    "cross_entropy": lambda low: F.cross_entropy(low, torch.zeros(2).long()),
    "softmax": lambda low: low.softmax(-1),
    "layer_norm": lambda low: F.layer_norm(low, (4,)),
    "cat": lambda low: torch.cat([x, low]),
    "stack": lambda low: torch.stack([low, x]),
    "add": lambda low: x + low,
    "relu": lambda low: low.relu(),
    "fp64": lambda low: square.double() @ square.double(),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_result_dtypes(op: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    results = []
    for region in (amp_ext.autocast, torch.autocast):
        with region("cpu", dtype=dtype):
            results.append(op(x.to(dtype)))
    assert results[0].dtype == results[1].dtype
    assert torch.equal(*results)


def state() -> tuple[Any, ...]:
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )


REGIONS: dict[str, Callable[[Any], Any]] = {
    "default": lambda region: region("cpu"),
    "fp16": lambda region: region("cpu", torch.float16),
    "keywords": lambda region: region(device_type="cpu", dtype=torch.bfloat16, cache_enabled=False),
    "disabled": lambda region: region("cpu", enabled=False),
}


@pytest.mark.parametrize("inner", REGIONS)
@pytest.mark.parametrize("outer", REGIONS)
def test_nesting(outer: str, inner: str) -> None:
    def states(region: Any) -> list[Any]:
        seen = [state()]
        with REGIONS[outer](region):
            seen.append(state())
            with REGIONS[inner](region):
                seen.append(state())
            seen.append(state())
        return [*seen, state()]

    assert states(amp_ext.autocast) == states(torch.autocast)


def test_is_left_after_an_exception() -> None:
    before = state()
    with contextlib.suppress(ValueError), amp_ext.autocast("cpu", torch.float16):
        raise ValueError
    assert state() == before


def test_decorates_functions_and_methods() -> None:
    class Net(nn.Module):
        @amp_ext.autocast("cpu", dtype=torch.bfloat16)
        def forward(self, value: Tensor) -> Tensor:
            """Documented."""
            return value @ square

    assert Net()(x).dtype == torch.bfloat16
    assert Net.forward.__doc__ == "Documented."
    assert not torch.is_autocast_enabled("cpu")


def test_is_a_plain_subclass() -> None:
    assert issubclass(amp_ext.autocast, torch.autocast)
    assert amp_ext.autocast.__name__ == "autocast"
    assert inspect.signature(amp_ext.autocast) == inspect.signature(torch.autocast)
    for function in ("custom_fwd", "custom_bwd", "is_autocast_available"):
        assert getattr(amp_ext, function) is getattr(torch.amp, function)


@pytest.mark.parametrize("device_type", ["nonsense", 3, None], ids=repr)
def test_bad_device_type(device_type: Any) -> None:
    errors = []
    for region in (torch.autocast, amp_ext.autocast):
        with pytest.raises((RuntimeError, ValueError)) as raised:
            region(device_type)
        errors.append((type(raised.value), str(raised.value)))
    assert errors[0] == errors[1]


def gradients(region: Any, run: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with region("cpu", dtype=torch.bfloat16):
        loss = run(net, x.clone().requires_grad_()).float().square().mean()
    loss.backward()
    return [param.grad for param in net.parameters()]


WAYS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "eager": lambda net, value: net(value),
    "checkpoint": lambda net, value: checkpoint(net, value, use_reentrant=False),
    "reentrant checkpoint": lambda net, value: checkpoint(net, value, use_reentrant=True),
    "TorchScript": lambda net, value: torch.jit.trace(net, value, check_trace=False)(value),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("run", WAYS.values(), ids=WAYS)
def test_backward(run: Callable[[nn.Module, Tensor], Tensor]) -> None:
    ours, theirs = gradients(amp_ext.autocast, run), gradients(torch.autocast, run)
    assert all(map(torch.equal, ours, theirs))


def test_custom_functions_see_the_region() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        @amp_ext.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx: Any, value: Tensor) -> Tensor:
            seen.append((value.dtype, torch.is_autocast_enabled("cpu")))
            return value * 2

        @staticmethod
        @amp_ext.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.append((grad.dtype, torch.is_autocast_enabled("cpu")))
            return grad * 2

    seen: list[Any] = []
    with amp_ext.autocast("cpu"):
        Double.apply(x.bfloat16().requires_grad_()).sum().backward()
    assert seen == [(torch.float32, False), (torch.float32, False)]


def within_a_region(value: Tensor) -> Tensor:
    with amp_ext.autocast("cpu", dtype=torch.bfloat16):
        return (value @ square).relu()


@pytest.mark.parametrize(
    "fullgraph",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                torch.torch_version.TorchVersion(torch.__version__) < (2, 13),
                reason="Dynamo of this torch breaks the graph at a subclass of torch.autocast",
            ),
        ),
    ],
)
def test_region_compiles(fullgraph: bool) -> None:
    torch._dynamo.reset()
    result = torch.compile(within_a_region, backend="aot_eager", fullgraph=fullgraph)(x)
    assert result.dtype == torch.bfloat16
    assert result.equal(within_a_region(x))


def test_compiled_function_within_a_region() -> None:
    torch._dynamo.reset()
    with amp_ext.autocast("cpu", dtype=torch.bfloat16):
        result = torch.compile(lambda v: v @ square, backend="aot_eager", fullgraph=True)(x)
    assert result.dtype == torch.bfloat16


def test_other_threads_are_not_affected() -> None:
    seen = []
    with amp_ext.autocast("cpu"):
        thread = threading.Thread(target=lambda: seen.append(torch.is_autocast_enabled("cpu")))
        thread.start()
        thread.join()
    assert seen == [False]


class Casts(TorchDispatchMode):
    """Counts conversions."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("clear", "casts"), [(False, 1), (True, 3)])
def test_weights_are_cast_once_until_the_cache_is_cleared(clear: bool, casts: int) -> None:
    weight, low = torch.ones(4, 4, requires_grad=True), x.bfloat16()
    with amp_ext.autocast("cpu", dtype=torch.bfloat16), Casts() as mode:
        for _ in range(3):
            F.linear(low, weight)
            if clear:
                torch.clear_autocast_cache()
    assert mode.count == casts


IMPORT_CHANGES_NOTHING = """
import warnings
import torch

def registered():
    keys = ("AutocastCPU", "AutocastCUDA", "CPU", "CUDA", "Autograd", "Meta", "")
    return {k: set(torch._C._dispatch_get_registrations_for_dispatch_key(k)) for k in keys}

def names():
    spaces = (torch, torch.amp, torch.amp.grad_scaler, torch.amp.autocast_mode, torch.optim)
    return [dict(vars(space)) for space in spaces]

before, before_names = registered(), names()
with warnings.catch_warnings():
    warnings.simplefilter("error")
    import amp_ext
for key, ops in registered().items():
    assert {op for op in ops - before[key] if not op.startswith("amp_ext::")} == set(), key
    assert before[key] <= ops, key
assert [n.keys() for n in names()] == [n.keys() for n in before_names]
assert all(a[k] is b[k] for a, b in zip(names(), before_names) for k in b)
"""


def test_importing_changes_nothing_in_torch() -> None:
    subprocess.run([sys.executable, "-c", IMPORT_CHANGES_NOTHING], check=True)
