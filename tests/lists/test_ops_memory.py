"""Test that ops refuse freed, shrunk, negated or shared memory, and write nothing then."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from amp_ext import ops
from amp_ext.ops import GEMM_OPS, LIST_OPS
from cases import assert_all_same, assert_same, tensors, written
from places import Place, assert_refused, of_ops, places
from reference import arguments

# ---- freed and shrunk --------------------------------------------------------------------------


@of_ops(LIST_OPS + GEMM_OPS)
def test_freed_storage(place: Place) -> None:
    """A storage freed as by FSDP is an error."""
    values = arguments(place.op)
    place.put(values, place.of(values).clone())
    place.of(values).untyped_storage().resize_(0)
    text = rf"amp_ext::{place.op}: {place.said} needs a storage of \d+ bytes, but its storage has 0"
    assert_refused(place.op, values, text)


def test_shrunk_storage() -> None:
    """A storage may shrink to the last byte of the view, and no further."""
    wholes = [torch.ones(4, 4) for _ in range(4)]
    views = wholes[0].view(-1)[4:], wholes[1][:, :2], wholes[2][1:3], wholes[3][3:3]
    for whole, view, needed in zip(wholes, views, (64, 56, 48, 0), strict=True):
        grads, found_inf, factor = [torch.ones(2), view], torch.zeros(()), torch.tensor(0.5)
        whole.untyped_storage().resize_(needed)
        ops.unscale_(grads, found_inf, factor)
        assert view.unique().tolist() == [0.5] * (needed > 0), needed
        if needed:
            whole.untyped_storage().resize_(needed - 1)
            text = rf"needs a storage of {needed} bytes, but its storage has {needed - 1}:"
            values = {"grads": grads, "found_inf": found_inf, "inv_scale": factor}
            assert_refused("unscale_", values, rf"grads\[1\] {text}")


# ---- negated -----------------------------------------------------------------------------------

NEGATABLE = ("grads", "inputs", "a", "b")
MUTATING = tuple(op for op in LIST_OPS + GEMM_OPS if written(op))


@of_ops(MUTATING, lambda place: place.argument not in NEGATABLE)
def test_negated_view_is_refused(place: Place) -> None:
    values = arguments(place.op)
    place.put(values, torch._neg_view(place.of(values).clone()))
    assert_refused(place.op, values, rf"{place.said} is a negated view, expected .*: resolve_neg\(")


def zeros(tensor: Tensor) -> Tensor:
    return torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype)


@pytest.mark.parametrize("make", [torch._neg_view, zeros], ids=["negated", "zeros"])
@of_ops(MUTATING, lambda place: place.argument in NEGATABLE)
def test_tensors_that_torch_materialises(place: Place, make: Callable[[Tensor], Tensor]) -> None:
    """Negated views count as their values, and so do zero tensors, which torch does not write."""
    values, expected = arguments(place.op), arguments(place.op)
    made = make(place.of(values).clone())
    place.put(values, made.clone() if make is zeros and place.is_written else made)
    place.put(expected, made.clone().resolve_neg())
    results = [getattr(ops, place.op)(**given) for given in (values, expected)]
    assert_all_same(*([t.resolve_neg().clone() for t in tensors(v)] for v in (values, expected)))
    assert results[0] is None or assert_same(*results) is None


# ---- shared ------------------------------------------------------------------------------------

COLUMNS = torch.zeros(8, 10)
NUMPYS = COLUMNS.numpy()  # tensors made from it have their own storages


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (one, other)
        for op in MUTATING
        for one, other in itertools.combinations(places(op), 2)
        if one.is_written or other.is_written
    ],
    ids=lambda place: f"{place.op}-{place.argument}",
)
def test_what_is_written_is_apart_from_all_else(one: Place, other: Place) -> None:
    """Written arguments must not overlap others by 4 or 8 bytes, and may lie side by side."""
    for apart in (False, True):
        values, memory = arguments(one.op), torch.zeros(64, dtype=torch.float64)
        first, second = one.of(values).contiguous(), other.of(values).contiguous()
        end = first.nbytes if apart else first.nbytes - min(first.nbytes, second.element_size())
        for place, tensor, start in (
            (one, first, 0),
            (other, second, -(-end // 8) * 8 if apart else end // 8 * 8),
        ):
            size = tensor.element_size()
            put = tensor.new_empty(0).set_(memory.untyped_storage(), start // size, tensor.shape)
            place.put(values, put.copy_(tensor))
        if apart:
            getattr(ops, one.op)(**values)
        else:
            names = {one.said, other.said}
            both = "|".join(rf"{a} and {b}" for a, b in itertools.permutations(names))
            assert_refused(one.op, values, rf"amp_ext::{one.op}: ({both}) overlap in memory")


@pytest.mark.parametrize(
    ("grads", "named"),
    [
        ([COLUMNS[:3], COLUMNS[5:], COLUMNS[2:4]], (0, 2)),
        ([COLUMNS, COLUMNS[3, 4]], (0, 1)),
        ([COLUMNS[:4], COLUMNS[2:, :5]], (0, 1)),
        ([COLUMNS[:, :5], COLUMNS[0, :2]], (0, 1)),
        ([COLUMNS.half().view(torch.float32)[:, :3], COLUMNS[0], COLUMNS[0, 9]], (1, 2)),
        ([torch.ones(2), COLUMNS, torch.from_numpy(NUMPYS[1:3])], (1, 2)),
        ([torch.ones(2), COLUMNS, torch.from_numpy(NUMPYS[:, :2])], (1, 2)),
    ],
)  # fmt: skip
def test_overlapping_gradients_and_outputs(grads: list[Tensor], named: tuple[int, int]) -> None:
    for op, argument in (("unscale_", "grads"), ("cast_", "outputs")):
        values: dict[str, Any] = {argument: grads}
        if op == "cast_":
            values["inputs"] = [torch.ones_like(grad, dtype=torch.float64) for grad in grads]
        else:
            values |= {"found_inf": torch.zeros(()), "inv_scale": torch.tensor(0.5)}
        text = rf"{argument}\[{named[0]}\] and {argument}\[{named[1]}\] overlap in memory, expected"
        assert_refused(op, values, text)


def test_gradient_in_another_order_on_a_parameter() -> None:
    """A gradient that is copied first, into its parameter's order, may not lie on another one."""
    memory = torch.ones(20)
    params, grads = [torch.ones(2, 4).t(), memory[6:11]], [memory[:8].view(4, 2), torch.ones(5)]
    options = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0}
    values = {"params": params, "grads": grads, **options}
    assert_refused("sgd_", values, r"params\[1\] and grads\[0\] overlap in memory")


def test_gradients_that_touch_or_interleave() -> None:
    """Gradients may be columns, every second element, or slices of one buffer in any order."""
    memory = torch.ones(120)
    columns = memory[:40].view(4, 10)
    grads = [columns[:, 5:], columns[:, :5], memory[41:60:2], memory[40:60:2]]
    grads += [memory[80:100], memory[60:80], memory[100:100], memory[100:]]
    ops.unscale_(grads, torch.zeros(()), torch.tensor(0.5))
    assert memory.unique().tolist() == [0.5]


@pytest.mark.parametrize(("count", "clusters"), [(2, 1), (33, 3), (5000, 3)])
def test_one_overlap_in_a_long_list(count: int, clusters: int) -> None:
    """One overlap by a byte is found anywhere in a long unordered list, at any distance."""
    rng = random.Random(count + clusters)
    memory = [torch.ones(1 << 21) for _ in range(clusters)]
    found_inf, factor = torch.zeros(()), torch.tensor(1.0)
    starts = [rng.randrange(3) + 8 * i for i in range(count)]
    sizes = [rng.randrange(1, 6) for _ in range(count)]
    for _ in range(5):
        order = rng.sample(range(count), count)
        grads = [memory[i % clusters][starts[i] : starts[i] + sizes[i]] for i in order]
        ops.unscale_(grads, found_inf, factor)
        first, second = sorted(rng.sample(range(count), 2))
        last = grads[first][-1:]
        grads[second] = last.as_strided((1, 2), (2, 1))
        with pytest.raises(RuntimeError, match=rf"grads\[{first}\] and grads\[{second}\] overlap"):
            ops.unscale_(grads, found_inf, factor)
