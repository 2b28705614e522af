"""Test that compiled programs keep the routing, and that exported ones run without amp_ext."""

import contextlib
import copy
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F

import amp_ext
from autocast_cases import CONTRACTIONS, Seen
from cases import assert_all_same, assert_same

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, of its own code
FP16 = torch.float16


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    """A network of every routed op."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4, bias=False)
        self.pointwise = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(torch.tanh(self.first(x)))
        scores = torch.baddbmm(x.mean(), hidden, hidden.mT) + hidden @ hidden.mT
        return self.pointwise(scores[:, :, None] + x[:, :, None, :1])


ROUTED_IN_NET = 5


class Entering(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        with amp_ext.autocast("cpu", dtype=FP16):
            result = self.net(x)
        return result.float()


class Graphs:
    """A backend for torch.compile that runs the graphs unchanged and records their ops."""

    def __init__(self) -> None:
        self.forward: list[Any] = []
        self.backward: list[Any] = []
        kept = partial(keep, self.forward), partial(keep, self.backward)
        self.backend = aot_autograd(fw_compiler=kept[0], bw_compiler=kept[1])


def keep(ops: list[Any], graph: torch.fx.GraphModule, inputs: Any) -> Any:
    ops.extend(node.target for node in graph.graph.nodes)
    return torch._dynamo.backends.debugging.boxed_nop(graph, inputs)


@pytest.mark.parametrize("place", ["around", "around, install()", "inside", "inside, breaks"])
def test_compiled_program(place: str, request: pytest.FixtureRequest) -> None:
    """The graphs hold the calls of eager mode, so the values have the same bits.

    An earlier export changes nothing.
    """
    inside, region = place.startswith("inside"), amp_ext.autocast
    net, x, graphs = Net(), torch.randn(2, 3, 4), Graphs()
    torch.export.export(Entering(net), (x,))
    if "install" in place:
        amp_ext.install()
        request.addfinalizer(amp_ext.uninstall)
        region = torch.autocast
    results = []
    for compiles in (False, True):
        twin, leaf = copy.deepcopy(net), x.clone().requires_grad_()
        program = Entering(twin) if inside else twin
        if compiles:
            program = torch.compile(
                program, backend=graphs.backend, fullgraph="breaks" not in place
            )
        if compiles and inside:
            amp_ext.uninstall()  # the program overrides torch's ops itself
        with contextlib.nullcontext() if inside else region("cpu", dtype=FP16):
            result = program(leaf)
        assert result.dtype == (torch.float32 if inside else FP16)
        result.float().square().mean().backward()
        results.append([result, leaf.grad, *(parameter.grad for parameter in twin.parameters())])
    assert_all_same(*results)
    gemm = torch.ops.amp_ext.gemm.default
    assert graphs.forward.count(gemm) == ROUTED_IN_NET
    assert graphs.backward.count(gemm) == 2 * ROUTED_IN_NET
    ops = (*graphs.forward, *graphs.backward)
    assert not CONTRACTIONS & {getattr(op, "overloadpacket", None) for op in ops}
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("order", [1, -1], ids=["amp_ext first", "torch first"])
def test_one_program_for_each_kind_of_region(order: int) -> None:
    """A program is compiled again for the other kind of region, and not for other numbers of rows.

    Programs of dynamic shapes are compiled for one row and for any number of rows.
    """
    graphs, weight = Graphs(), torch.randn(3, 4)
    program = torch.compile(F.linear, backend=graphs.backend, fullgraph=True, dynamic=True)
    for region in (amp_ext.autocast, torch.autocast)[::order]:
        graphs.forward.clear()
        for rows in (2, 3, 5, 7):
            x = torch.randn(rows, 4)
            with region("cpu", dtype=FP16), torch.no_grad():
                assert_same(program(x, weight), F.linear(x, weight))
        gemms = graphs.forward.count(torch.ops.amp_ext.gemm.default)
        assert gemms in ((1, 2) if region is amp_ext.autocast else (0,))


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("raises", [False, True])
def test_failed_traces_leave_no_state(raises: bool, fullgraph: bool) -> None:
    """A trace that stops within a region leaves the state of autocast as it was."""

    def program(x: Tensor) -> Tensor:
        with amp_ext.autocast("cpu", dtype=FP16):
            product = x @ x
            if raises:
                raise ValueError
            torch._dynamo.graph_break()
            return product @ x

    def state() -> tuple[Any, ...]:
        devices = ("cpu", "cuda", amp_ext._C.REGION_MARK)
        return tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices)

    square, before = torch.ones(4, 4), state()
    compiled = torch.compile(program, backend="aot_eager", fullgraph=fullgraph)
    for _ in range(2):
        if raises or fullgraph:
            with pytest.raises(Exception):  # noqa: B017  (Dynamo wraps it, or refuses to break)
                compiled(square)
        else:
            assert compiled(square).equal(program(square))
        assert state() == before


@pytest.mark.parametrize("is_made_inside", [False, True])
def test_region_object_entered_in_a_compiled_function(is_made_inside: bool) -> None:
    """A compiled function may enter a region that it, or its caller, has made."""
    given = None if is_made_inside else amp_ext.autocast("cpu", dtype=FP16)

    def program(x: Tensor) -> Tensor:
        region = given or amp_ext.autocast("cpu", dtype=FP16)
        if is_made_inside:
            torch._dynamo.graph_break()
        with region:
            return x @ x

    x = torch.ones(4, 4)
    with Seen() as seen:
        result = torch.compile(program, backend="aot_eager")(x)
    assert (result.dtype, seen.gemms) == (FP16, 1)


@pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="no C++ compiler")
def test_inductor_function_that_enters_a_region() -> None:
    """An inductor program has an FP32 gradient beyond FP16's range, by the CPU's own name."""
    weight = torch.ones(3, 4, requires_grad=True)

    @torch.compile(backend="inductor", fullgraph=True)
    def program(x: Tensor) -> Tensor:
        with amp_ext.cpu.amp.autocast(dtype=FP16):
            return F.linear(x, weight)

    result = program(torch.ones(2, 4))
    assert result.dtype == FP16
    result.backward(torch.full_like(result, 61440.0))
    assert weight.grad.eq(122880.0).all()


@pytest.mark.parametrize("installs", [False, True])
def test_programs_on_disk(installs: bool, request: pytest.FixtureRequest) -> None:
    """A program that torch.compile has kept on disk serves its own kind of region only."""
    request.addfinalizer(amp_ext.uninstall)
    x = torch.randn(8, 4)
    with fresh_cache():
        for is_ours in (False, True, False):
            torch._dynamo.reset()
            net = nn.Linear(4, 4)
            if installs:
                (amp_ext.install if is_ours else amp_ext.uninstall)()
            region = amp_ext.autocast if is_ours and not installs else torch.autocast
            with region("cpu", torch.bfloat16):
                result = torch.compile(net)(x)
            result.float().square().sum().backward()
            grad = net.weight.grad
            assert torch.equal(grad, grad.bfloat16().float()) != is_ours


# ---- exported programs ---------------------------------------------------------------------------

KINDS = ["trace", "export", "strict export", "decomposed export"]
LOADS = """
import sys, torch
inputs, expected = torch.load("values")
for kind in sys.argv[1:]:
    model = torch.jit.load(kind) if kind == "trace" else torch.export.load(kind).module()
    assert model(*inputs).float().equal(expected), kind
assert not [name for name in sys.modules if name.startswith("amp_ext")]
"""


class Exported(nn.Module):
    """A linear, a convolution of single pixels and a product, optionally in their own region."""

    def __init__(self, region: Any) -> None:
        super().__init__()
        self.linear, self.conv, self.region = nn.Linear(4, 4), nn.Conv2d(2, 4, 1), region
        for parameter in self.parameters():
            parameter.data = whole(*parameter.shape)

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        with self.region():
            hidden = self.linear(x) @ self.linear.weight
            return hidden + self.conv(image).flatten(2).sum(-1)


def whole(*shape: int) -> Tensor:
    """Return small whole numbers: their products are exact in every dtype."""
    return torch.randint(-2, 3, shape).float()


def save(model: Exported, inputs: tuple[Tensor, ...], kind: str, path: Path) -> None:
    if kind == "trace":
        torch.jit.trace(model, inputs).save(path)
        return
    program = torch.export.export(model, inputs, strict=kind.startswith("strict"))
    if kind.startswith("decomposed"):
        program = program.run_decompositions()
    torch.export.save(program, path.with_suffix(".pt2"))
    path.with_suffix(".pt2").rename(path)


@pytest.mark.parametrize("place", ["within", "around"])
@pytest.mark.parametrize("name", ["amp_ext.autocast", "install"])
def test_programs_load_without_amp_ext(
    name: str, place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A saved program gives the model's result in a process with torch alone."""
    region = partial(amp_ext.autocast, "cpu", FP16)
    if name == "install":
        amp_ext.install()
        request.addfinalizer(amp_ext.uninstall)
        region = partial(torch.autocast, "cpu", FP16)
    within, around = (
        (region, contextlib.nullcontext) if place == "within" else (contextlib.nullcontext, region)
    )
    model, inputs = Exported(within), (whole(3, 4), whole(3, 2, 3, 3))
    # torch.jit.trace around a region alone: it cannot record a cast from the cache of an outer one.
    kinds = KINDS if place == "within" else KINDS[1:]
    with around():
        torch.save((inputs, model(*inputs).detach().float()), tmp_path / "values")
        for kind in kinds:
            save(model, inputs, kind, tmp_path / kind)
    command = [sys.executable, "-c", LOADS, *kinds]
    subprocess.run(command, check=True, cwd=tmp_path)
