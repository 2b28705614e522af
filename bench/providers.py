"""Who takes part: amp_ext's backends, torch.compile, Apex and TransformerEngine."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import amp_ext
from amp_ext._library import _C
from registry import BASELINE, Provider

COMPILE, APEX, TRANSFORMER_ENGINE = "compile", "apex", "te"
LIBRARY = "library"  # amp_ext with products by torch's GEMM


class Line(NamedTuple):
    """How a provider's line of a table comes about.

    Args:
        launch: the op, or what makes an object that is timed; an op's cases say what it takes.
        around: a context for each sample, entered and left untimed.
        flag: the dtype of the found_inf that it takes, if any.
    """

    launch: Callable[..., Any]
    around: Callable[[], AbstractContextManager] = nullcontext
    flag: torch.dtype = torch.float32


@contextmanager
def _choice(backend: str | None, gemm_kernels: bool) -> Iterator[None]:
    """Choose a backend, and whether its kernels form products or torch's library."""
    before = amp_ext.get_backend(), _C.uses_gemm_kernels()
    amp_ext.set_backend(backend)
    _C.use_gemm_kernels(gemm_kernels)
    try:
        yield
    finally:
        amp_ext.set_backend(before[0])
        _C.use_gemm_kernels(before[1])


def ours(
    device: torch.device, products: bool = False
) -> dict[str, Callable[[], AbstractContextManager]]:
    """The lines of amp_ext: their names, and the context in which each is launched.

    On a CPU "cpu". On a GPU "cuda" and "triton", as far as they are built or installed; with
    `products` (ops that consist of them) also "library".
    """
    if device.type == "cpu":
        return {"cpu": nullcontext}
    from amp_ext._triton import triton_version

    lines = {}
    if _C.cuda_built():
        lines["cuda"] = lambda: _choice("cuda", True)
    if triton_version():
        lines["triton"] = lambda: _choice("triton", True)
    if products:
        lines[LIBRARY] = lambda: _choice(None, False)
    return lines


def lines(
    mine: Callable[..., Any],
    theirs: Callable[..., Any],
    device: torch.device,
    products: bool = False,
) -> dict[str, Line]:
    """A line for each of amp_ext's backends, as `ours` has them, and torch's, the baseline."""
    contexts = ours(device, products)
    return {
        **{name: Line(mine, around) for name, around in contexts.items()},
        BASELINE: Line(theirs),
    }


def guarded(name: str, make: Callable[[], Provider]) -> Provider:
    """What `make` returns; where it raises, a provider that raises the same when launched, and so
    leaves the others their results."""
    try:
        return make()
    except Exception as error:
        return Provider(name, partial(_raise, error.with_traceback(None)))


def _raise(error: Exception) -> None:
    raise error


@contextmanager
def without_tf32() -> Iterator[None]:
    """FP32 products and convolutions of FP32 precision: by default a GPU's convolutions are of
    TF32, with 10 bits of mantissa."""
    switches = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [switch.allow_tf32 for switch in switches]
    try:
        for switch in switches:
            switch.allow_tf32 = False
        yield
    finally:
        for switch, allowed in zip(switches, before, strict=True):
            switch.allow_tf32 = allowed


def compiled(
    function: Callable[..., object], run: Callable[[Callable[..., object]], object]
) -> Callable[..., object] | None:
    """The function by torch.compile; None where that fails.

    Programs compiled before are dropped: a function has only so many at a time.

    Args:
        function: what to compile.
        run: calls the program as the benchmark will, forward and backward, to have it compiled.
    """
    torch.compiler.reset()
    program = torch.compile(function, dynamic=False)
    try:
        run(program)
    except Exception as error:  # of any type: a missing compiler, or what inductor cannot do
        reason = (str(error).splitlines() or [""])[0]
        print(f"{COMPILE} is left out: {type(error).__name__}: {reason}", file=sys.stderr)
        return None
    return program


def _imported(*names: str) -> list[ModuleType] | None:
    try:
        return [importlib.import_module(name) for name in names]
    except Exception:  # RuntimeError and OSError too, where it was built for another torch
        return None


class Apex(NamedTuple):
    """Apex's multi-tensor kernels. A flag is int32, 1 element: set to 1 by what is not finite."""

    kernels: ModuleType
    apply: Callable[..., object]

    def unscale(self, groups: Sequence[Sequence[Tensor]], flag: Tensor, factor: float) -> None:
        """Multiply in place; a group is of one dtype."""
        for grads in groups:
            self.apply(self.kernels.multi_tensor_scale, flag, [grads, grads], factor)

    def norm(self, groups: Sequence[Sequence[Tensor]], flag: Tensor) -> Tensor:
        """The L2 norm of all, float32, 1 element."""
        kernel = self.kernels.multi_tensor_l2norm
        norms = [self.apply(kernel, flag, [grads], False)[0] for grads in groups]
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.cat(norms))


def apex(device: torch.device) -> Apex | None:
    """None on a CPU, and where Apex or its extension is not installed."""
    if device.type != "cuda":
        return None
    found = _imported("amp_C", "apex.multi_tensor_apply")
    return Apex(found[0], found[1].multi_tensor_applier) if found else None


class TransformerEngine(NamedTuple):
    """TransformerEngine's layers, without FP8, with the parameters of torch's."""

    layers: ModuleType

    def linear(self, layer: torch.nn.Linear) -> torch.nn.Module:
        module = self.layers.Linear(
            layer.in_features, layer.out_features, bias=True, params_dtype=layer.weight.dtype
        )
        return _with_values(module, weight=layer.weight, bias=layer.bias)

    def norm_mlp(
        self, norm: torch.nn.LayerNorm, first: torch.nn.Linear, second: torch.nn.Linear
    ) -> torch.nn.Module:
        """LayerNorm, linear, GELU by tanh, linear."""
        module = self.layers.LayerNormMLP(
            first.in_features,
            first.out_features,
            eps=norm.eps,
            bias=True,
            activation="gelu",
            params_dtype=first.weight.dtype,
        )
        return _with_values(
            module,
            layer_norm_weight=norm.weight,
            layer_norm_bias=norm.bias,
            fc1_weight=first.weight,
            fc1_bias=first.bias,
            fc2_weight=second.weight,
            fc2_bias=second.bias,
        )


def _with_values(module: torch.nn.Module, **values: Tensor) -> torch.nn.Module:
    with torch.no_grad():
        for name, value in values.items():
            getattr(module, name).copy_(value)
    return module


def transformer_engine(device: torch.device) -> TransformerEngine | None:
    """None on a CPU, and where it is not installed."""
    if device.type != "cuda":
        return None
    found = _imported("transformer_engine.pytorch")
    return TransformerEngine(found[0]) if found else None
