"""adam_: an update of every parameter by Adam, AdamW or AMSGrad. One launch."""

import triton.language as tl

from amp_ext.triton_kernels.launch import kernel
from amp_ext.triton_kernels.lists.foreach import ListLauncher, walk
from amp_ext.triton_kernels.numerics import device_function, double, number, pointer
from amp_ext.triton_kernels.optim import update


@kernel
def adam_kernel(
    table: tl.int64,
    size: tl.int64,
    chunks: tl.int64,
    lr: tl.int64,  # the bits of a double, as the four numbers after it
    beta1: tl.int64,
    beta2: tl.int64,
    eps: tl.int64,
    weight_decay: tl.int64,
    decoupled: tl.int32,
    maximize: tl.int32,
    is_stochastic: tl.int32,
    tensor_lr: tl.int64,
    found_inf: tl.int64,
    inv_scale: tl.int64,
    norm: tl.int64,
    max_norm: tl.float32,
    ticket: tl.int64,
):
    if update.runs(found_inf, norm):
        rate, unscale, clip = update.step_factors(
            lr, tensor_lr, inv_scale, norm, max_norm, maximize
        )
        options = (double(beta1), double(beta2), double(eps), double(weight_decay), decoupled != 0)
        arguments = (rate, unscale, clip, options, is_stochastic != 0)
        walk(table, update.ENTRY_WORDS, size, chunks, _update_entry, (), arguments)
        if ticket != 0:
            update.advance_steps(table, size, ticket)


# ptxas would give the sm_80 kernel 128 registers: too few.
adam_ = ListLauncher(adam_kernel, programs=1, maxnreg=168)


@device_function
def _update_entry(entry, begin, count, state, arguments):
    lr, unscale, clip, options, is_stochastic = arguments
    beta1, beta2, eps, weight_decay, decoupled = options
    t = update.update_number(tl.load(pointer(tl.load(entry + update.STEP_WORD), tl.float32)))
    inv_root = (1.0 / tl.sqrt(1.0 - update.power(beta2, t))).to(tl.float32)
    step_size = (lr / (1.0 - update.power(beta1, t))).to(tl.float32)
    l2 = tl.where(decoupled, 0.0, weight_decay).to(tl.float32)
    keep = tl.where(decoupled, 1.0 - lr * weight_decay, 1.0).to(tl.float32)
    rates = (
        beta1.to(tl.float32),
        (1.0 - beta1).to(tl.float32),
        beta2.to(tl.float32),
        (1.0 - beta2).to(tl.float32),
    )
    factors = (unscale, clip, l2, rates, inv_root, eps.to(tl.float32), keep, step_size)
    rounding = (is_stochastic, update.noise_seed(t, entry), begin)

    dtypes = number(tl.load(entry + update.DTYPES_WORD))
    second = (dtypes >> 24) & 0xFF
    tensors = (
        update.tensor_at(entry, 0, dtypes & 0xFF, begin),
        update.tensor_at(entry, 1, (dtypes >> 8) & 0xFF, begin),
        update.tensor_at(entry, 2, (dtypes >> 16) & 0xFF, begin),
        update.tensor_at(entry, 3, second, begin),
        update.tensor_at(entry, 4, second, begin),
        update.tensor_at(entry, 5, (dtypes >> 32) & 0xFF, begin),
    )
    update.update_segment(_update, tensors, dtypes & 0xFFFFFFFF, count, (factors, rounding))
    return state


@device_function
def _update(tensors, i, mask, arguments, PLAIN: tl.constexpr, ALIGNED: tl.constexpr):
    param, grad, exp_avg, exp_avg_sq, largest, copy = tensors
    factors, rounding = arguments
    unscale, clip, l2, rates, inv_root, eps, keep, step_size = factors
    beta1, rest1, beta2, rest2 = rates
    p = update.load_float(param, i, mask, PLAIN, ALIGNED)
    p = update.replace_stale(p, copy, i, mask, ALIGNED)
    g = update.load_float(grad, i, mask, PLAIN, ALIGNED)
    first = update.load_float(exp_avg, i, mask, PLAIN, ALIGNED)
    second = update.load_float(exp_avg_sq, i, mask, PLAIN, ALIGNED)
    most = update.load_float(largest, i, mask, PLAIN, ALIGNED)

    g = update.final_gradient(g, p, unscale, clip, l2)
    first = beta1 * first + rest1 * g
    second = beta2 * second + rest2 * g * g
    update.store_state(exp_avg, i, first, mask, rounding, 0, 16, PLAIN, ALIGNED)
    update.store_state(exp_avg_sq, i, second, mask, rounding, 1, 0, PLAIN, ALIGNED)
    # The larger one; a NaN if either is.
    is_larger = update.where_also((most > second) | (most != most), largest[0] != 0)
    second = tl.where(is_larger, most, second)
    update.store_state(largest, i, second, mask, rounding, 1, 16, PLAIN, ALIGNED)
    p = p * keep - step_size * tl.div_rn(first, tl.sqrt_rn(second) * inv_root + eps)
    update.store_state(param, i, p, mask, rounding, 0, 0, PLAIN, ALIGNED)
    update.store_half(copy, i, p, mask, ALIGNED)
