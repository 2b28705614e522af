"""bench/cublaslt.py: what cuBLASLt is told of matrices, and the choice of its algorithm.

Without a GPU a fake stands for the library, and multiplies what it is given pointers to.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from ctypes import c_void_p
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ops import gemm as bench_gemm
from harness import cublaslt
from harness import measure
from harness import providers
from harness import registry
from harness import timing
from cases import integers, stored
from harness.cublaslt import Layout
from workloads.gemm_shapes import Shape

TRANSPOSES = [(a, b) for a in (False, True) for b in (False, True)]
every_transpose = pytest.mark.parametrize("trans", TRANSPOSES, ids=["nn", "nt", "tn", "tt"])
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


def operands(trans: tuple[bool, bool], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Return a [24, 40] and b [40, 16], stored as their transposes where `trans` says so."""
    shapes, where = ((24, 40), (40, 16)), torch.device(device)
    made = [stored(integers(s, dtype, where), t) for s, t in zip(shapes, trans, strict=True)]
    return tuple(x.mT if t else x for x, t in zip(made, trans, strict=True))


def as_cublaslt_reads(matrix: Tensor, layout: Layout) -> Tensor:
    columns = matrix.as_strided((layout.rows, layout.columns), (1, layout.leading))
    return columns.mT if layout.transposed else columns


@every_transpose
def test_layouts_are_those_of_the_transposed_product(trans: tuple[bool, bool]) -> None:
    a, b = operands(trans, torch.float64, "cpu")
    layouts = [Layout.of_transpose(x) for x in (b, a)]
    assert [layout.transposed for layout in layouts] == [trans[1], trans[0]]
    out = as_cublaslt_reads(b, layouts[0]) @ as_cublaslt_reads(a, layouts[1])
    assert torch.equal(out, (a @ b).mT)


def test_layout_of_part_of_a_matrix() -> None:
    whole = torch.arange(60.0).view(6, 10)
    for part in (whole[1:4, 2:7], whole.mT[2:7, 1:4]):
        layout = Layout.of_transpose(part)
        assert layout.leading == 10
        assert torch.equal(as_cublaslt_reads(part, layout), part.mT)


def test_matrix_without_unit_stride() -> None:
    with pytest.raises(ValueError, match=r"a matrix of strides \(20, 2\) has no unit stride"):
        Layout.of_transpose(torch.zeros(4, 20)[:, ::2])


class Fake:
    """cuBLASLt's functions, on matrices in a CPU's memory; handles are places in `made`, plus 1.

    Args:
        times_ms: of each algorithm, by number; None where its launch fails.
    """

    FAILED = 15

    def __init__(self, times_ms: Sequence[float | None] = (1.0,)) -> None:
        self.times_ms = times_ms
        self.made: list[dict] = []
        self.preferences: dict[int, tuple[int, int]] = {}
        self.launched: list[tuple] = []

    def _make(self, handle, **what) -> int:
        self.made.append(what)
        handle._obj.value = len(self.made)
        return 0

    def _get(self, handle: c_void_p) -> dict:
        return self.made[handle.value - 1]

    def cublasLtCreate(self, handle) -> int:
        return self._make(handle)

    def cublasLtMatmulDescCreate(self, handle, compute: int, scale: int) -> int:
        assert (compute, scale) == (68, 0)
        return self._make(handle)

    def cublasLtMatmulDescSetAttribute(self, description, attribute: int, value, size) -> int:
        assert size.value == 4
        self._get(description)[attribute] = value._obj.value
        return 0

    def cublasLtMatrixLayoutCreate(self, handle, dtype: int, rows, columns, leading) -> int:
        dtypes = {number: dtype for dtype, number in cublaslt.TYPES.items()}
        size = rows.value, columns.value
        return self._make(handle, dtype=dtypes[dtype], size=size, leading=leading.value)

    def cublasLtMatmulPreferenceCreate(self, handle) -> int:
        return self._make(handle)

    def cublasLtMatmulPreferenceSetAttribute(self, handle, attribute: int, value, size) -> int:
        self.preferences[attribute] = value._obj.value, size.value
        return 0

    def cublasLtMatmulPreferenceDestroy(self, handle) -> int:
        return 0

    def cublasLtMatmulAlgoGetHeuristic(
        self, handle, description, a, b, c, d, preference, requested: int, results, found
    ) -> int:
        """Names one more that is not for these matrices."""
        found._obj.value = len(self.times_ms) + 1
        for number in range(len(self.times_ms)):
            results[number].algorithm[0] = number
        results[len(self.times_ms)].state = 1
        return 0

    def _matrix(self, pointer: c_void_p, handle: c_void_p) -> Tensor:
        layout = self._get(handle)
        rows, columns = layout["size"]
        count = (columns - 1) * layout["leading"] + rows
        memory = (ctypes.c_char * (count * layout["dtype"].itemsize)).from_address(pointer.value)
        flat = torch.frombuffer(memory, dtype=layout["dtype"])
        return flat.as_strided((rows, columns), (1, layout["leading"]))

    def cublasLtMatmul(self, *arguments) -> int:
        self.launched.append(arguments)
        _, description, alpha, a, of_a, b, of_b, beta, c, of_c, d, of_d, best, *rest = arguments
        workspace_size, stream = rest[1:]
        assert (workspace_size.value, stream.value) == (cublaslt.WORKSPACE_BYTES, STREAM)
        assert (c.value, of_c) == (d.value, of_d)
        if self.times_ms[best._obj.algorithm[0]] is None:
            return self.FAILED
        left, right, out = self._matrix(a, of_a), self._matrix(b, of_b), self._matrix(d, of_d)
        left, right = (
            matrix.mT if self._get(description)[attribute] else matrix
            for matrix, attribute in ((left, 3), (right, 4))
        )
        product = alpha._obj.value * (left.double() @ right.double())
        if beta._obj.value:
            product += beta._obj.value * out.double()
        out.copy_(product)
        return 0

    @property
    def algorithms(self) -> list[int]:
        return [arguments[12]._obj.algorithm[0] for arguments in self.launched]

    def elapsed_ms(self, launches: Sequence[Callable[[], None]]) -> float:
        for launch in launches:
            launch()
        return sum(self.times_ms[number] for number in self.algorithms[-len(launches) :])


STREAM = 7


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake()
    stream = SimpleNamespace(cuda_stream=STREAM)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(cublaslt, "_elapsed_ms", made.elapsed_ms)
    library = cublaslt.Library(made, torch.empty(1))
    monkeypatch.setattr(cublaslt, "library", lambda: library)
    return made


@every_transpose
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_what_cublaslt_is_asked_for(fake: Fake, trans, dtype: torch.dtype, beta: float) -> None:
    a, b = operands(trans, dtype, "cpu")
    out = torch.full((24, 16), 3.0 if beta else torch.nan, dtype=torch.float32)
    product = cublaslt.Product(cublaslt.library(), a, b, out, beta)
    (algorithm,) = product.algorithms()
    product.launch(algorithm, a, b, out)()
    assert torch.equal(out.double(), a.double() @ b.double() + 3 * beta)
    assert fake.preferences == {1: (64 << 20, 8), 3: (2, 4)}  # workspace; parts of sums in FP32


def test_fastest_of_those_that_run(fake: Fake) -> None:
    """Each is timed on the operands in turn; one whose launch fails is left out."""
    fake.times_ms = 0.5, None, 0.25, 3.0
    a, b = operands((False, False), torch.float16, "cpu")
    outs = [torch.zeros(24, 16) for _ in range(3)]
    product = cublaslt.Product(cublaslt.library(), a, b, outs[0], 1.0)
    best = product.fastest([(a, b, out) for out in outs])
    assert best.algorithm[0] == 2
    runs = [fake.algorithms.count(number) for number in range(4)]
    assert runs == [12, 1, 12, 4], "fewer of what takes above a millisecond"
    assert torch.equal(sum(outs).double(), 28 * (a.double() @ b.double()))
    assert (outs[0] - outs[2]).abs().max() <= 2 * (a.double() @ b.double()).abs().max()


@pytest.mark.parametrize(
    ("times", "message"),
    [([None, None], ": cublasLtMatmul returned status 15"), ([], "")],
)
def test_without_an_algorithm(fake: Fake, times, message: str) -> None:
    fake.times_ms = times
    a, b = operands((False, False), torch.float16, "cpu")
    each = a, b, torch.zeros(24, 16)
    product = cublaslt.Product(cublaslt.library(), *each)
    with pytest.raises(RuntimeError, match=f"no algorithm for these matrices{message}$"):
        product.fastest([each])


def test_other_operands(fake: Fake) -> None:
    """A launch is of operands of the product's kind; what it passes is made once."""
    a, b = operands((True, False), torch.float16, "cpu")
    out = torch.zeros(24, 16)
    product = cublaslt.Product(cublaslt.library(), a, b, out)
    (algorithm,) = product.algorithms()
    for others in ((a.contiguous(), b, out), (a, b, out.half()), (a[:8], b, out[:8])):
        with pytest.raises(ValueError, match="operands are not of the product's kind"):
            product.launch(algorithm, *others)
    launch = product.launch(algorithm, a.clone(), b.clone(), out)
    launch()
    launch()
    first, second = fake.launched
    assert all(x is y for x, y in zip(first, second, strict=True))
    assert torch.equal(out.double(), a.double() @ b.double())


def test_one_library_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Fake] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made.append(Fake()) or made[-1])
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: torch.zeros(1, dtype=dtype))
    cublaslt.library.cache_clear()
    try:
        assert cublaslt.library() is cublaslt.library()
        assert len(made) == 1
    finally:
        cublaslt.library.cache_clear()


# ---- in bench_gemm -----------------------------------------------------------------------------

WGRAD = Shape("wgrad", 24, 16, 40, "TN", torch.float32)
ACCUMULATE = Shape("accumulate", 24, 16, 40, "TN", torch.float32, accumulate=True)
FORWARD = Shape("forward", 24, 16, 40, "NT")
CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [FORWARD, WGRAD, ACCUMULATE], ids=lambda shape: shape.name)
def test_the_timed_algorithm_is_the_verified_one(fake: Fake, shape: Shape) -> None:
    fake.times_ms = 0.5, 0.25, 0.75
    given = bench_gemm.Operands.of(shape, torch.float16, CPU)
    sets = [given, given.clone(), given.clone()]
    provider, line = bench_gemm.by_cublaslt(shape, torch.float16, sets)
    fake.launched.clear()
    for _ in sets:
        provider.launch()
    outs = {arguments[10].value for arguments in fake.launched}
    assert len(outs) == (3 if shape.accumulate else 1), "a result's memory is used again"
    fresh = bench_gemm.Operands.of(shape, torch.float16, CPU)
    assert bench_gemm.verify(shape, fresh, {"cublaslt": line}) == {}
    assert fake.algorithms == 4 * [1]


def test_without_the_library_the_others_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise OSError("libcublasLt.so.13: cannot open shared object file")

    monkeypatch.setattr(cublaslt, "library", missing)
    setup = registry.Setup(CPU, quick=True)

    def build() -> registry.Trial:
        trial = bench_gemm.build(FORWARD, torch.float16, CPU)
        given = bench_gemm.Operands.of(FORWARD, torch.float16, CPU)
        failing = providers.guarded(
            "cublaslt", lambda: bench_gemm.by_cublaslt(FORWARD, torch.float16, [given])[0]
        )
        return dataclasses.replace(trial, providers=(*trial.providers, failing))

    case = registry.Case("a product", build, baseline="cublaslt")
    budget = timing.Budget(0.0, 3, 20.0)
    made = measure.measure(case, bench_gemm.OP, setup, budget, ours_only=False)
    assert list(made.errors) == ["cublaslt"]
    assert made.errors["cublaslt"].startswith("OSError: libcublasLt.so.13: cannot open")
    assert list(made.times) == ["cpu", "torch", "fp32"]
    assert made.ratio("cpu") is None


# ---- the library itself ------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu() -> None:
    with pytest.raises((OSError, RuntimeError), match=r"libcublasLt|CUDA|NVIDIA"):
        cublaslt.library()


@on_gpu
@every_transpose
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("to_fp32", [False, True])
def test_fastest(trans: tuple[bool, bool], dtype: torch.dtype, to_fp32: bool) -> None:
    """Sums of 40 products of integers up to 3 are exact in FP16 and, up to 256, in BF16."""
    a, b = operands(trans, dtype, "cuda")
    out_dtype = torch.float32 if to_fp32 else dtype
    outs = [torch.full((24, 16), torch.nan, dtype=out_dtype, device="cuda") for _ in range(2)]
    exact = a.double() @ b.double()
    product = cublaslt.Product(cublaslt.library(), a, b, outs[0])
    algorithm = product.fastest([(a, b, out) for out in outs])
    for out in outs:
        product.launch(algorithm, a, b, out.fill_(torch.nan))()
        assert torch.equal(out.double(), exact.to(out.dtype).double())


@on_gpu
def test_fastest_adds() -> None:
    a, b = operands((True, False), torch.float16, "cuda")
    outs = [torch.zeros(24, 16, device="cuda") for _ in range(2)]
    product = cublaslt.Product(cublaslt.library(), a, b, outs[0], beta=1.0)
    launch = product.launch(product.fastest([(a, b, outs[0])]), a, b, outs[1])
    for _ in range(3):
        launch()
    assert torch.equal(outs[1].double(), 3 * (a.double() @ b.double()))
