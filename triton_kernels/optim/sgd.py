"""sgd_: an update of every parameter by gradient descent with momentum. One launch."""

import triton.language as tl

from amp_ext.triton_kernels.launch import kernel
from amp_ext.triton_kernels.lists.foreach import ListLauncher, walk
from amp_ext.triton_kernels.numerics import device_function, double, number, pointer
from amp_ext.triton_kernels.optim import update


@kernel
def sgd_kernel(
    table: tl.int64,
    size: tl.int64,
    chunks: tl.int64,
    lr: tl.int64,  # the bits of a double, as the three numbers after it
    momentum: tl.int64,
    dampening: tl.int64,
    weight_decay: tl.int64,
    nesterov: tl.int32,
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
        rates = (double(momentum).to(tl.float32), (1.0 - double(dampening)).to(tl.float32))
        l2 = double(weight_decay).to(tl.float32)
        factors = (unscale, clip, l2, rates, rate.to(tl.float32), nesterov != 0)
        arguments = (factors, is_stochastic != 0)
        walk(table, update.ENTRY_WORDS, size, chunks, _update_entry, (), arguments)
        if ticket != 0:
            update.advance_steps(table, size, ticket)


sgd_ = ListLauncher(sgd_kernel, programs=2)


@device_function
def _update_entry(entry, begin, count, state, arguments):
    factors, is_stochastic = arguments
    step = number(tl.load(entry + update.STEP_WORD))
    done = tl.load(pointer(step, tl.float32), mask=step != 0, other=0.0)
    t = tl.where(step != 0, update.update_number(done), 0)
    rounding = (is_stochastic, update.noise_seed(t, entry), begin)

    dtypes = number(tl.load(entry + update.DTYPES_WORD))
    tensors = (
        update.tensor_at(entry, 0, dtypes & 0xFF, begin),
        update.tensor_at(entry, 1, (dtypes >> 8) & 0xFF, begin),
        update.tensor_at(entry, 2, (dtypes >> 16) & 0xFF, begin),
        update.tensor_at(entry, 5, (dtypes >> 32) & 0xFF, begin),
    )
    update.update_segment(_update, tensors, dtypes & 0xFFFFFF, count, (factors, t == 1, rounding))
    return state


@device_function
def _update(tensors, i, mask, arguments, PLAIN: tl.constexpr, ALIGNED: tl.constexpr):
    param, grad, buffer, copy = tensors
    factors, is_first, rounding = arguments
    unscale, clip, l2, rates, lr, nesterov = factors
    momentum, rest = rates
    p = update.load_float(param, i, mask, PLAIN, ALIGNED)
    p = update.replace_stale(p, copy, i, mask, ALIGNED)
    g = update.load_float(grad, i, mask, PLAIN, ALIGNED)
    m = update.load_float(buffer, i, mask, PLAIN, ALIGNED)

    g = update.final_gradient(g, p, unscale, clip, l2)
    m = tl.where(is_first, g, momentum * m + rest * g)
    update.store_state(buffer, i, m, mask, rounding, 0, 16, PLAIN, ALIGNED)
    g = tl.where(buffer[0] == 0, g, tl.where(nesterov, g + momentum * m, m))
    p = p - lr * g
    update.store_state(param, i, p, mask, rounding, 0, 0, PLAIN, ALIGNED)
    update.store_half(copy, i, p, mask, ALIGNED)
