"""The ops under torch.ops.amp_ext, with the schemas of the extension module."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from amp_ext._python import lists, products, updates

_GEMM = (
    "(Tensor a, Tensor b, *, bool trans_a=False, bool trans_b=False, bool sum_batch=False, "
    "Tensor? c=None, float alpha=1.0, float beta=1.0, Tensor? bias=None, "
    'str activation="none", ScalarType? out_dtype=None)'
)
_STEP = (
    "bool maximize=False, bool stochastic_rounding=False, Tensor? tensor_lr=None, "
    "Tensor({})? found_inf=None, Tensor? inv_scale=None, Tensor? norm=None, "
    "float? max_norm=None) -> ()"
)
# What writes, or is not differentiable: by the function, and by one for tensors without data.
LISTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "unscale_(Tensor(a!)[] grads, Tensor(b!) found_inf, Tensor inv_scale, *, Tensor? norm=None, "
    "float? max_norm=None) -> ()": (lists.unscale_, lists.unscale_fake),
    "check_finite(Tensor[] grads, Tensor(a!) found_inf) -> ()": (
        lists.check_finite,
        lists.check_finite_fake,
    ),
    "grad_norm(Tensor[] grads, Tensor(a!) found_inf, Tensor? inv_scale=None, *, "
    "Tensor(b!)? norms=None) -> Tensor": (lists.grad_norm, lists.grad_norm_fake),
    "cast_(Tensor(a!)[] outputs, Tensor[] inputs) -> ()": (lists.cast_, lists.cast_fake),
    "update_scale_(Tensor(a!) scale, Tensor(b!) growth_tracker, Tensor[] found_infs, "
    "float growth_factor, float backoff_factor, int growth_interval, *, float? min_scale=None, "
    "float? max_scale=None, int hysteresis=1, bool restarts_hysteresis=False, "
    "Tensor(c!)? hysteresis_tracker=None, Tensor(d!)? skipped_steps=None, "
    "Tensor(e!)? next_step=None, Tensor(f!)? history=None, Tensor? norm=None) -> ()": (
        lists.update_scale_,
        lists.update_scale_fake,
    ),
    "adam_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] steps, *, float lr, float beta1, float beta2, float eps, float weight_decay, "
    "bool decoupled, Tensor(e!)[]? max_exp_avg_sqs=None, Tensor(f!)[]? copies=None, "
    + _STEP.format("g!"): (updates.adam_, updates.adam_fake),
    "sgd_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[]? momentum_buffers=None, "
    "Tensor(c!)[]? steps=None, *, float lr, float momentum, float dampening, bool nesterov, "
    "float weight_decay, Tensor(d!)[]? copies=None, " + _STEP.format("e!"): (
        updates.sgd_,
        updates.sgd_fake,
    ),
    "gemm_accumulate_(Tensor(a!) c, Tensor a, Tensor b, *, bool trans_a=False, "
    "bool trans_b=False, bool sum_batch=False, float alpha=1.0) -> ()": (
        products.gemm_accumulate_,
        products.gemm_accumulate_fake,
    ),
}
# Products of torch's differentiable ops.
PRODUCTS: dict[str, Callable[..., Any]] = {
    f"gemm{_GEMM} -> Tensor": products.gemm,
    f"gemm_with_aux{_GEMM} -> (Tensor, Tensor)": products.gemm_with_aux,
    "gemm_times_derivative(Tensor a, Tensor b, Tensor aux, *, bool trans_a=False, "
    'bool trans_b=False, str activation="none", ScalarType? out_dtype=None) -> (Tensor, Tensor)': (
        products.gemm_times_derivative
    ),
    'linear(Tensor x, Tensor weight, Tensor? bias=None, *, str activation="none", '
    "bool accumulate_grad=False) -> Tensor": products.linear,
    "mlp(Tensor x, Tensor weight1, Tensor? bias1, Tensor weight2, Tensor? bias2, *, "
    'str activation="gelu", bool accumulate_grad=False) -> Tensor': products.mlp,
    "gated_mlp(Tensor x, Tensor gate_weight, Tensor? gate_bias, Tensor up_weight, "
    "Tensor? up_bias, Tensor down_weight, Tensor? down_bias, *, "
    'str activation="silu", bool accumulate_grad=False) -> Tensor': products.gated_mlp,
}

_TAGS = (torch.Tag.pt2_compliant_tag,)
_DATA = ("CPU", "CUDA", "SparseCPU", "SparseCUDA", "SparseCsrCPU", "SparseCsrCUDA")
_library = torch.library.Library("amp_ext", "DEF")


def _name(schema: str) -> str:
    return schema.partition("(")[0]


def _below_autograd(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def body(*args: Any, **kwargs: Any) -> Any:
        guard = torch._C._AutoDispatchBelowADInplaceOrView()
        try:
            with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
                return function(*args, **kwargs)
        finally:
            del guard

    return body


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
for key in ("AutocastCUDA",):
    _AUTOCAST = _AUTOCAST.add(getattr(torch._C.DispatchKey, key))


def _define() -> None:
    for schema, (function, fake) in LISTS.items():
        _library.define(schema, tags=_TAGS)
        for key in _DATA:
            _library.impl(_name(schema), _below_autograd(function), key)
        _library.impl(_name(schema), fake, "Meta")
        for key in ("Negative", "Conjugate"):
            _library.impl(_name(schema), torch.library.fallthrough_kernel, key)
    for name, function in (
        ("cast_", lists.cast_),
        ("adam_", updates.adam_),
        ("sgd_", updates.sgd_),
    ):
        # Empty lists name no device.
        _library.impl(name, _below_autograd(function), "CompositeExplicitAutograd")
    for schema, function in PRODUCTS.items():
        _library.define(schema, tags=_TAGS)
        _library.impl(_name(schema), function, "CompositeImplicitAutograd")
    # What a compiled program of amp_ext.autocast calls.
    _library.define("_override_autocast() -> ()", tags=_TAGS)
    _library.impl("_override_autocast", lambda: None, "CompositeExplicitAutograd")


_define()


def op_caller(name: str, registered: Callable[..., Any]) -> Callable[..., Any]:
    """The function of an op."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return registered(*args, **kwargs)

    call.__name__ = name
    return call
