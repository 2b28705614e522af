"""Test adam_ and sgd_ together, bit for bit against the oracle."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import reference
from amp_ext import ops
from cases import CHUNKS, assert_all_same, assert_same, tensors, threads, unwritten
from executors import CPU, Executor, against_oracle, every_executor
from optim_cases import BF16, FP16, FP32, OPS, Values, call, check, copied, placed

every_op = pytest.mark.parametrize("op", OPS)
CHUNK = CHUNKS[0]


def copies_of(params: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return roundings of parameters. Other code has written every third element."""
    copies = [param.to(dtype) for param in params]
    for copy in copies:
        copy.as_strided((copy.numel(),), (1,))[::3] += 1.0
    return copies


@against_oracle
@every_op
@pytest.mark.parametrize("amsgrad", [False, True])
def test_dtypes(executor: Executor, op: str, amsgrad: bool) -> None:
    """Parameter, gradient and moments may each have any dtype, and two moments may differ."""
    others = {FP32: FP16, FP16: BF16, BF16: FP32}
    for dtype, grad_dtype, moment in itertools.product(others, repeat=3):
        for second in (moment, others[moment])[: 1 + (op == "adam_")]:
            state = {"dtypes": (moment, second), "amsgrad": amsgrad}
            check(executor, op, call(executor, op, [(37,)], dtype, grad_dtype, state))


@against_oracle
@every_op
def test_sizes(executor: Executor, op: str) -> None:
    """Tensors of every size have chunks of their own."""
    sizes = executor.some([1, 2, 3, 4, 5, 1023, 1025, 4096, CHUNK - 1, CHUNK, CHUNK + 5], 4)
    check(executor, op, call(executor, op, [(size,) for size in [*sizes, 0, 3 * CHUNK + 7]]))


@against_oracle
@every_op
@pytest.mark.parametrize("kind", [FP32, BF16], ids=str)
def test_alignments(executor: Executor, op: str, kind: torch.dtype) -> None:
    """Any alignment of one tensor or of all is right, and memory around them is unchanged."""
    names = ["params", "grads", "copies"]
    names += ["exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"] * (op == "adam_")
    names += ["momentum_buffers"] * (op == "sgd_")
    for moved, offset in itertools.product([*([name] for name in names), names], (1, 2)):
        state = {"dtypes": (kind, kind), "amsgrad": op == "adam_"}
        values = call(executor, op, [(executor.length(1030),), (30,)], FP32, kind, state)
        values["copies"] = copies_of(values["params"], FP16)
        for name in moved:
            values[name] = [placed(x.cpu(), offset).to(executor.device) for x in values[name]]
        check(executor, op, values)


@against_oracle
@every_op
@pytest.mark.parametrize("step", [-1.0, math.nan, 2.0**24, 2.0**31, math.inf], ids=str)
def test_steps_beyond_what_is_counted(executor: Executor, op: str, step: float) -> None:
    values = call(executor, op, [(7,)], stochastic_rounding=True)
    values["steps"] = [executor.scalar(step)]
    check(executor, op, values)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": Tensor.t,
    "holes": lambda t: torch.stack([t, t], -1)[..., 1],
    "expanded": lambda t: t[:1, :1].expand_as(t),
    "negated": torch._neg_view,
}


@against_oracle
@every_op
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_in_another_order(executor: Executor, op: str, layout: str) -> None:
    values = call(executor, op, [(6, 6), (5, 5)])
    values["grads"][0] = LAYOUTS[layout](values["grads"][0])
    expected = copied(values) | {"grads": [g.clone().resolve_neg() for g in values["grads"]]}
    getattr(reference, op)(**expected)
    with unwritten(values["grads"]):
        getattr(executor.ops, op)(**values)
    assert_all_same(tensors(values | {"grads": []}), tensors(expected | {"grads": []}))


@against_oracle
@every_op
def test_parameters_in_any_order(executor: Executor, op: str) -> None:
    values = call(executor, op, [(6, 4), (2, 3, 4, 5)], copies=[])
    for name, value in values.items():
        if isinstance(value, list) and name not in ("steps", "copies"):
            value[0] = value[0].clone().as_strided((6, 4), (1, 6))
            value[1] = value[1].to(memory_format=torch.channels_last)
    check(executor, op, values)


@every_executor
@every_op
def test_nothing_but_empty_parameters(executor: Executor, op: str) -> None:
    values = call(executor, op, [(0,), (0, 3)])
    getattr(executor.ops, op)(**values)
    assert [step.item() for step in values["steps"]] == [1.0, 4.0]
    lists = {name: [] if isinstance(x, list) else x for name, x in values.items()}
    found_inf, norm = executor.scalar(0.0), executor.scalar(math.nan)
    getattr(executor.ops, op)(**lists, found_inf=found_inf, norm=norm)
    assert found_inf.item() == 1.0


# ---- scalars of the step -----------------------------------------------------------------------


@every_executor
@every_op
def test_a_bad_norm_without_a_flag_is_an_overflow(executor: Executor, op: str) -> None:
    values = call(executor, op, [(CHUNK + 5,), (3,)], norm=executor.scalar(math.inf), max_norm=1.0)
    with unwritten(tensors(values)):
        getattr(executor.ops, op)(**values)


@every_executor
@every_op
@pytest.mark.parametrize("max_norm", [None, 0.5, 7.0])
def test_unscaled_and_clipped_as_by_unscale(
    executor: Executor, op: str, max_norm: float | None
) -> None:
    """float32 gradients are unscaled and clipped as by unscale_, without another rounding."""
    scalars = {"inv_scale": executor.scalar(0.3)}
    if max_norm:
        scalars["norm"] = executor.scalar(6.0)
    values = call(executor, op, found_inf=executor.scalar(0.0))
    plain = copied(values)
    executor.ops.unscale_(plain["grads"], plain["found_inf"], **scalars, max_norm=max_norm)
    with unwritten(values["grads"]):
        getattr(executor.ops, op)(**values, **scalars, max_norm=max_norm)
    getattr(executor.ops, op)(**plain)
    assert_all_same(values["params"], plain["params"])


@against_oracle
@every_op
def test_scaled_half_gradients(executor: Executor, op: str) -> None:
    """Products below the range of float16 are not lost, and lead upwards."""
    values = call(executor, op, grad_dtype=FP16, inv_scale=executor.scalar(2.0**-40))
    values |= {"norm": executor.scalar(0.3), "max_norm": 0.1, "maximize": True}
    values |= {"weight_decay": 0.0, "eps": 0.0} if op == "adam_" else {"lr": 2.0**40}
    for name in ("params", "steps", "exp_avgs", "exp_avg_sqs", "momentum_buffers"):
        for tensor in values.get(name, ()):
            tensor.zero_()
    check(executor, op, values)
    for param, grad in zip(values["params"], values["grads"], strict=True):
        assert (param.sign() == grad.sign()).all()


@against_oracle
@every_op
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38, 1e-45])
def test_extreme_gradients(executor: Executor, op: str, value: float) -> None:
    """Gradients without a check enter the state as in torch."""
    values = call(executor, op, state={"amsgrad": True}, maximize=True)
    values["grads"][0][3] = value
    values["params"][0][5] = value
    values["grads"][1].fill_(value)
    check(executor, op, values)


# ---- stochastic rounding -----------------------------------------------------------------------


def rounded_at_random(
    executor: Executor, value: float, count: int, step: float = 5.0, index: int = 0
) -> Tensor:
    """Return bfloat16 parameters, updated by SGD to a value that is not of bfloat16."""
    params = [torch.zeros(count, dtype=BF16, device=executor.device) for _ in range(index + 1)]
    grads = [torch.full((count,), -value, device=executor.device) for _ in params]
    options: Values = {"lr": 1.0, "weight_decay": 0.0, "stochastic_rounding": True}
    options |= {"momentum": 0.0, "dampening": 0.0, "nesterov": False}
    steps = [executor.scalar(step) for _ in params]
    executor.ops.sgd_(params, grads, None, steps, **options)
    return params[index]


@every_executor
def test_rounded_to_either_neighbour_without_a_bias(executor: Executor) -> None:
    """A value rounds to either neighbour without a bias.

    1 + 2**-7 / 4 becomes 1 + 2**-7 with a probability of 1/4. There are n = 3 * 16384 elements; a
    share off by more than 5 standard deviations, sqrt(3 / 16 / n) each, has a probability of 6e-7.
    """
    count = 3 * CHUNK
    values = rounded_at_random(executor, 1 + 2.0**-9, count).float()
    assert set(values.unique().tolist()) == {1.0, 1 + 2.0**-7}
    share = (values > 1).double().mean().item()
    assert abs(share - 0.25) < 5 * math.sqrt(3 / 16 / count)
    for chunk in values.split(CHUNK):
        assert abs((chunk > 1).double().mean().item() - 0.25) < 5 * math.sqrt(3 / 16 / CHUNK)


@every_executor
def test_bits_differ_by_element_chunk_tensor_and_step(executor: Executor) -> None:
    """Bits differ by element, chunk, tensor and step.

    Two independent rows of 16384 bits agree in a half of them, +- 5 * 64.
    """
    one = rounded_at_random(executor, 1 + 2.0**-8, 2 * CHUNK)
    others = [one[CHUNK:], one[:CHUNK].roll(1), one[:CHUNK].roll(4)]
    others += [rounded_at_random(executor, 1 + 2.0**-8, CHUNK, step=6.0)]
    others += [rounded_at_random(executor, 1 + 2.0**-8, CHUNK, index=1)]
    for other in others:
        assert abs((one[:CHUNK] == other).sum().item() - CHUNK // 2) < 5 * 64
    assert_same(one, rounded_at_random(executor, 1 + 2.0**-8, 2 * CHUNK))


@every_executor
def test_what_bfloat16_has_is_not_rounded(executor: Executor) -> None:
    for value in (1.0, -0.375, math.inf, -math.inf):
        values = rounded_at_random(executor, value, 500)
        assert values.unique().tolist() == [value]
    assert rounded_at_random(executor, math.nan, 500).isnan().all()


@against_oracle
@every_op
def test_copies_and_greatest_moments_of_stochastic_rounding(executor: Executor, op: str) -> None:
    """Only bfloat16 state rounds stochastically; copies round to nearest."""
    state: Values = {"dtypes": (BF16, BF16), "amsgrad": True}
    values = call(executor, op, [(4100,), (3,)], state=state, stochastic_rounding=True)
    values["copies"] = copies_of(values["params"], BF16)
    check(executor, op, values)


# ---- threads -----------------------------------------------------------------------------------


@every_op
def test_same_result_for_any_number_of_threads(op: str) -> None:
    executor = Executor("cpu", CPU, ops)
    values = call(executor, op, [(1 << 20,), (3,), ((1 << 20) + 9,)])
    expected = None
    for count in (1, 2, 3):
        mine = copied(values)
        with threads(count):
            getattr(executor.ops, op)(**mine)
        expected = expected or tensors(mine)
        assert_all_same(tensors(mine), expected)
