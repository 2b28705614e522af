"""Test torch's requirements of each op: schema, meta kernel, tracing, versions."""

import sys

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import programs
from amp_ext import ops, verify
from amp_ext.ops import GEMM_OPS, LIST_OPS
from cases import assert_all_same, whole_and_view
from executors import Executor, against_oracle
from reference import arguments


@against_oracle
@pytest.mark.parametrize("name", LIST_OPS + GEMM_OPS)
def test_opcheck(executor: Executor, name: str) -> None:
    values = arguments(name, executor.device)
    torch.library.opcheck(getattr(torch.ops.amp_ext, name).default, (), values)


@against_oracle
@pytest.mark.parametrize("name", LIST_OPS)
def test_cases(executor: Executor, name: str) -> None:
    """The cases that verify a kernel before its first use hold on every executor."""
    for case in getattr(ops, name).cases():
        verify.compare(case, executor.device)


@against_oracle
@pytest.mark.parametrize("name", LIST_OPS + GEMM_OPS)
def test_compiles_without_a_graph_break(executor: Executor, name: str) -> None:
    torch._dynamo.reset()
    function, results = getattr(ops, name), []
    for run in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        values = arguments(name, executor.device)
        leaves = tree_leaves((run(**values), values))
        results.append([leaf for leaf in leaves if isinstance(leaf, Tensor)])
    assert_all_same(*results)


@against_oracle
@pytest.mark.parametrize("name", LIST_OPS + GEMM_OPS)
def test_versions_count_what_is_written(executor: Executor, name: str) -> None:
    """Tensors that the schema says are written have new versions, for autograd; others have not."""
    values = arguments(name, executor.device)
    before = {id(t): t._version for t in tree_leaves(values) if isinstance(t, Tensor)}
    getattr(ops, name)(**values)
    for argument in getattr(torch.ops.amp_ext, name).default._schema.arguments:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        for value in tree_leaves(values.get(argument.name)):
            if isinstance(value, Tensor):
                assert (value._version > before[id(value)]) == is_written, argument.name


@against_oracle
def test_versions_of_views_with_holes(executor: Executor) -> None:
    grad = whole_and_view("columns", torch.float32, executor.device)[1]
    before = grad._version
    ops.unscale_([grad], executor.scalar(0.0), executor.scalar(0.5))
    ops.cast_([grad], [grad.half()])
    assert grad._version == before + 2


def test_modes_and_subclasses_see_calls() -> None:
    """Function modes see calls, also with an empty list, and a subclass in a list sees them."""
    seen: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    class Named(Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(str(function))

    with Functions():
        ops.cast_([], [])
    ops.check_finite([torch.ones(2), torch.ones(2).as_subclass(Named)], torch.zeros(1))
    assert "amp_ext.cast_" in seen[0]
    assert any("amp_ext.check_finite" in name for name in seen)


def test_importing_resolves_overloads() -> None:
    """An import resolves all overloads: threads that resolve one at once would each make one."""
    left = programs.output("""
        import torch, amp_ext
        names = torch._C._dispatch_get_all_op_names()
        ours = [name.split("::") for name in names if name.startswith("amp_ext::")]
        print([op for space, op in ours if "default" not in vars(getattr(torch.ops.amp_ext, op))])
    """)
    assert left == "[]\n"


def test_no_reference_is_left() -> None:
    grads, flag = [torch.ones(2)], torch.zeros(1)
    before = [sys.getrefcount(x) for x in (grads[0], flag, grads)]
    for _ in range(3):
        ops.check_finite(grads, flag)
        with pytest.raises(RuntimeError):
            ops.check_finite(grads, torch.zeros(2))
    assert [sys.getrefcount(x) for x in (grads[0], flag, grads)] == before
