"""adam_: an update of every parameter by Adam, AdamW or AMSGrad. One launch."""

import triton.language as tl
from amp_ext.triton_kernels.launch import Launcher
from amp_ext.triton_kernels.lists import foreach
from amp_ext.triton_kernels.lists.foreach import number, pointer, walk
from amp_ext.triton_kernels.numerics import (
    device_function,
    load_rows,  # noqa: F401  (16-byte accesses are expected of the machine code)
    store_rows,  # noqa: F401
)
from amp_ext.triton_kernels.optim import update
from amp_ext.triton_kernels.optim.update import (
    DTYPES_WORD,
    ENTRY_WORDS,
    STEP_WORD,
    advance_steps,
    double,
    load_float,
    noise_seed,
    power,
    runs,
    step_factors,
    store_half,
    store_state,
    tensor_at,
    update_number,
    update_segment,
    used_gradient,
    where_also,
)

# For sm_80 ptxas would take 128 registers, which are too few.
OPTIONS = update.OPTIONS | {"maxnreg": 168}
PROGRAMS_PER_MULTIPROCESSOR = 1


def adam_(table: int, size: int, chunks: int, options: tuple, scalars: tuple, ticket: int) -> None:
    """Launch the update. `options` and `scalars` are AdamOptions and StepScalars."""
    if not update.is_needed(chunks, scalars, ticket):
        return
    *numbers, decoupled, maximize, by_chance = options
    _launch(
        foreach.programs(chunks, PROGRAMS_PER_MULTIPROCESSOR),
        *(table, size, chunks, *update.patterns(*numbers)),
        *(int(decoupled), int(maximize), int(by_chance)),
        *(*scalars, ticket),
    )


@foreach.kernel
def adam_kernel(
    table: tl.int64,
    size: tl.int64,
    chunks: tl.int64,
    lr: tl.int64,
    beta1: tl.int64,
    beta2: tl.int64,
    eps: tl.int64,
    weight_decay: tl.int64,
    decoupled: tl.int32,
    maximize: tl.int32,
    by_chance: tl.int32,
    tensor_lr: tl.int64,
    found_inf: tl.int64,
    inv_scale: tl.int64,
    norm: tl.int64,
    max_norm: tl.float32,
    ticket: tl.int64,
):
    if runs(found_inf, norm):
        rate, unscale, clip = step_factors(lr, tensor_lr, inv_scale, norm, max_norm, maximize)
        options = (double(beta1), double(beta2), double(eps), double(weight_decay), decoupled != 0)
        arguments = (rate, unscale, clip, options, by_chance != 0)
        walk(table, ENTRY_WORDS, size, chunks, _update_entry, None, None, (), arguments)
        advance_steps(table, size, ticket)


_launch = Launcher(adam_kernel, OPTIONS)


@device_function
def _update_entry(
    visit: tl.constexpr, leave: tl.constexpr, tensor, entry, begin, count, state, arguments
):
    lr, unscale, clip, options, by_chance = arguments
    beta1, beta2, eps, weight_decay, decoupled = options
    update = update_number(tl.load(pointer(tl.load(entry + STEP_WORD), tl.float32)))
    inv_root = (1.0 / tl.sqrt(1.0 - power(beta2, update))).to(tl.float32)
    step_size = (lr / (1.0 - power(beta1, update))).to(tl.float32)
    l2 = tl.where(decoupled, 0.0, weight_decay).to(tl.float32)
    keep = tl.where(decoupled, 1.0 - lr * weight_decay, 1.0).to(tl.float32)
    rates = (
        beta1.to(tl.float32),
        (1.0 - beta1).to(tl.float32),
        beta2.to(tl.float32),
        (1.0 - beta2).to(tl.float32),
    )
    factors = (unscale, clip, l2, rates, inv_root, eps.to(tl.float32), keep, step_size)
    rounding = (by_chance, noise_seed(update, tensor), begin)

    dtypes = number(tl.load(entry + DTYPES_WORD))
    second = (dtypes >> 24) & 0xFF
    tensors = (
        tensor_at(entry, 0, dtypes & 0xFF, begin),
        tensor_at(entry, 1, (dtypes >> 8) & 0xFF, begin),
        tensor_at(entry, 2, (dtypes >> 16) & 0xFF, begin),
        tensor_at(entry, 3, second, begin),
        tensor_at(entry, 4, second, begin),
        tensor_at(entry, 5, (dtypes >> 32) & 0xFF, begin),
    )
    update_segment(_update, tensors, dtypes & 0xFFFFFFFF, count, (factors, rounding))
    return state


@device_function
def _update(tensors, i, mask, arguments, PLAIN: tl.constexpr, ALIGNED: tl.constexpr):
    param, grad, exp_avg, exp_avg_sq, largest, copy = tensors
    factors, rounding = arguments
    unscale, clip, l2, rates, inv_root, eps, keep, step_size = factors
    beta1, rest1, beta2, rest2 = rates
    p = load_float(param[0], param[1], i, mask, PLAIN, ALIGNED)
    g = load_float(grad[0], grad[1], i, mask, PLAIN, ALIGNED)
    first = load_float(exp_avg[0], exp_avg[1], i, mask, PLAIN, ALIGNED)
    second = load_float(exp_avg_sq[0], exp_avg_sq[1], i, mask, PLAIN, ALIGNED)
    most = load_float(largest[0], largest[1], i, mask, PLAIN, ALIGNED)

    g = used_gradient(g, p, unscale, clip, l2)
    first = beta1 * first + rest1 * g
    second = beta2 * second + rest2 * g * g
    store_state(exp_avg, i, first, mask, rounding, 0, 16, PLAIN, ALIGNED)
    store_state(exp_avg_sq, i, second, mask, rounding, 1, 0, PLAIN, ALIGNED)
    # The larger one; a NaN if one is.
    is_larger = where_also((most > second) | (most != most), largest[0] != 0)
    second = tl.where(is_larger, most, second)
    store_state(largest, i, second, mask, rounding, 1, 16, PLAIN, ALIGNED)
    p = p * keep - step_size * tl.div_rn(first, tl.sqrt_rn(second) * inv_root + eps)
    store_state(param, i, p, mask, rounding, 0, 0, PLAIN, ALIGNED)
    store_half(copy[0], copy[1], i, p, mask, ALIGNED)
