"""sgd_: an update of every parameter by gradient descent with momentum. One launch."""

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
    runs,
    step_factors,
    store_half,
    store_state,
    tensor_at,
    update_number,
    update_segment,
    used_gradient,
)

OPTIONS = update.OPTIONS
PROGRAMS_PER_MULTIPROCESSOR = update.PROGRAMS_PER_MULTIPROCESSOR


def sgd_(table: int, size: int, chunks: int, options: tuple, scalars: tuple, ticket: int) -> None:
    """Launch the update. `options` and `scalars` are SgdOptions and StepScalars."""
    if not update.is_needed(chunks, scalars, ticket):
        return
    *numbers, nesterov, maximize, by_chance = options
    _launch(
        foreach.programs(chunks, PROGRAMS_PER_MULTIPROCESSOR),
        *(table, size, chunks, *update.patterns(*numbers)),
        *(int(nesterov), int(maximize), int(by_chance)),
        *(*scalars, ticket),
    )


@foreach.kernel
def sgd_kernel(
    table: tl.int64,
    size: tl.int64,
    chunks: tl.int64,
    lr: tl.int64,
    momentum: tl.int64,
    dampening: tl.int64,
    weight_decay: tl.int64,
    nesterov: tl.int32,
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
        rates = (double(momentum).to(tl.float32), (1.0 - double(dampening)).to(tl.float32))
        l2 = double(weight_decay).to(tl.float32)
        factors = (unscale, clip, l2, rates, rate.to(tl.float32), nesterov != 0)
        walk(table, ENTRY_WORDS, size, chunks, _update_entry, None, None, (), (factors, by_chance))
        advance_steps(table, size, ticket)


_launch = Launcher(sgd_kernel, OPTIONS)


@device_function
def _update_entry(
    visit: tl.constexpr, leave: tl.constexpr, tensor, entry, begin, count, state, arguments
):
    factors, by_chance = arguments
    step = number(tl.load(entry + STEP_WORD))
    done = tl.load(pointer(step, tl.float32), mask=step != 0, other=0.0)
    update = tl.where(step != 0, update_number(done), 0)
    rounding = (by_chance != 0, noise_seed(update, tensor), begin)

    dtypes = number(tl.load(entry + DTYPES_WORD))
    tensors = (
        tensor_at(entry, 0, dtypes & 0xFF, begin),
        tensor_at(entry, 1, (dtypes >> 8) & 0xFF, begin),
        tensor_at(entry, 2, (dtypes >> 16) & 0xFF, begin),
        tensor_at(entry, 5, (dtypes >> 32) & 0xFF, begin),
    )
    update_segment(_update, tensors, dtypes & 0xFFFFFF, count, (factors, update == 1, rounding))
    return state


@device_function
def _update(tensors, i, mask, arguments, PLAIN: tl.constexpr, ALIGNED: tl.constexpr):
    param, grad, buffer, copy = tensors
    factors, is_first, rounding = arguments
    unscale, clip, l2, rates, lr, nesterov = factors
    momentum, rest = rates
    p = load_float(param[0], param[1], i, mask, PLAIN, ALIGNED)
    g = load_float(grad[0], grad[1], i, mask, PLAIN, ALIGNED)
    m = load_float(buffer[0], buffer[1], i, mask, PLAIN, ALIGNED)

    g = used_gradient(g, p, unscale, clip, l2)
    m = tl.where(is_first, g, momentum * m + rest * g)
    store_state(buffer, i, m, mask, rounding, 0, 16, PLAIN, ALIGNED)
    g = tl.where(buffer[0] == 0, g, tl.where(nesterov, g + momentum * m, m))
    p = p - lr * g
    store_state(param, i, p, mask, rounding, 0, 0, PLAIN, ALIGNED)
    store_half(copy[0], copy[1], i, p, mask, ALIGNED)
