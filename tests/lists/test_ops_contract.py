"""Test torch's requirements of each op: schema, meta kernel, tracing, versions."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from amp_ext import ops
from amp_ext.ops import GEMM_OPS, LIST_OPS
from amp_ext.ops._op import schema
from cases import assert_all_same, whole_and_view
from executors import Executor, against_oracle
from reference import arguments


@against_oracle
@pytest.mark.parametrize("name", LIST_OPS + GEMM_OPS)
def test_opcheck(executor: Executor, name: str) -> None:
    values = arguments(name, executor.device)
    torch.library.opcheck(getattr(torch.ops.amp_ext, name).default, (), values)


def test_schema_is_the_signature() -> None:
    def scale_(
        grads: Sequence[Tensor],
        factor: Tensor | None,
        norms: Tensor,
        *,
        dtype: torch.dtype | None = None,
        kind: str = "none",
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    assert schema(scale_, ("norms", "grads")) == (
        "scale_(Tensor(b!)[] grads, Tensor? factor, Tensor(a!) norms, *, "
        'ScalarType? dtype=None, str kind="none") -> (Tensor, Tensor)'
    )


@pytest.mark.parametrize("name", LIST_OPS + GEMM_OPS)
def test_meta(name: str) -> None:
    """Results of meta tensors have the shape and dtype of results on the CPU."""
    one, other = (getattr(ops, name)(**arguments(name, device)) for device in ("meta", "cpu"))
    assert type(one) is type(other)
    for meta, real in zip(as_tuple(one), as_tuple(other), strict=True):
        assert (meta.shape, meta.dtype, meta.device.type) == (real.shape, real.dtype, "meta")


def as_tuple(result: Tensor | tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else () if result is None else (result,)


def one_step(
    grads: list[Tensor], scale: Tensor, tracker: Tensor, skipped: Tensor
) -> tuple[Tensor, ...]:
    """Use every op on lists once, as a training step does."""
    found_inf = torch.zeros_like(scale)
    inv_scale = scale.double().reciprocal().float()
    ops.check_finite(grads, found_inf)
    norm = ops.grad_norm(grads, found_inf, inv_scale)
    ops.unscale_(grads, found_inf, inv_scale)
    ops.update_scale_(scale, tracker, [found_inf], 2.0, 0.5, 1, skipped_steps=skipped)
    copies = [torch.empty_like(grad, dtype=torch.float16) for grad in grads]
    ops.cast_(copies, grads)
    params = [torch.ones_like(grad, dtype=torch.float32) for grad in grads]
    first, second = ([torch.zeros_like(p) for p in params] for _ in range(2))
    steps = [torch.zeros_like(scale) for _ in params]
    common: dict[str, Any] = {"lr": 0.5, "weight_decay": 0.1, "found_inf": found_inf}
    betas = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "decoupled": True}
    ops.adam_(params, grads, first, second, steps, **betas, **common, copies=copies)
    moved = {"momentum": 0.9, "dampening": 0.0, "nesterov": True}
    ops.sgd_(params, grads, first, **moved, **common)
    return norm, found_inf, *copies, *params, *first, *second, *steps


@against_oracle
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_without_a_graph_break(executor: Executor, backend: str) -> None:
    def inputs() -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        grads = [torch.full((5, 3), 4.0), torch.full((7,), 8.0).bfloat16(), torch.full((), 16.0)]
        grads = [grad.to(executor.device) for grad in grads]
        scale, tracker = executor.scalar(4.0), executor.scalar(0, torch.int32)
        return grads, scale, tracker, executor.scalar(0, torch.int64)

    torch._dynamo.reset()
    eager, compiled = inputs(), inputs()
    expected = one_step(*eager)
    actual = torch.compile(one_step, backend=backend, fullgraph=True)(*compiled)
    assert_all_same(actual, expected)
    assert_all_same([*compiled[0], *compiled[1:]], [*eager[0], *eager[1:]])
    assert compiled[1].item() == 8.0


@against_oracle
@pytest.mark.parametrize("layout", ["contiguous", "columns"])
def test_autograd_notices_the_write(executor: Executor, layout: str) -> None:
    """Autograd raises if a saved gradient was rewritten."""
    grad = whole_and_view(layout, torch.float32, executor.device)[1]
    leaf = torch.ones_like(grad, requires_grad=True)
    product = (leaf * grad).sum()
    ops.check_finite([grad], executor.scalar(0.0))
    ops.grad_norm([grad], executor.scalar(0.0))
    product.backward(retain_graph=True)
    ops.unscale_([grad], executor.scalar(0.0), executor.scalar(0.5))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@against_oracle
@pytest.mark.parametrize("layout", ["contiguous", "columns", "empty"])
def test_autograd_notices_a_cast(executor: Executor, layout: str) -> None:
    """Each output of a cast counts as written once or more; the inputs do not."""
    output = whole_and_view(layout, torch.float16, executor.device)[1]
    source = torch.ones_like(output, dtype=torch.float32)
    before = output._version, source._version
    ops.cast_([output], [source])
    assert output._version > before[0]
    assert source._version == before[1]
