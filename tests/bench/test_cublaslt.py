"""bench/harness/cublaslt.py: what cuBLASLt is told of matrices, and the choice of its algorithm.

Without a GPU a fake stands for the library, and multiplies what it is given pointers to.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_void_p
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from cases import integers, stored
from harness import cublaslt
from ops import gemm
from workloads.gemm_shapes import Shape

TRANSPOSES = [(a, b) for a in (False, True) for b in (False, True)]
every_transpose = pytest.mark.parametrize("trans", TRANSPOSES, ids=["nn", "nt", "tn", "tt"])
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


def operands(trans: tuple[bool, bool], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Return a [24, 40] and b [40, 16], stored as their transposes where `trans` says so."""
    shapes, where = ((24, 40), (40, 16)), torch.device(device)
    made = [stored(integers(s, dtype, where), t) for s, t in zip(shapes, trans, strict=True)]
    return tuple(x.mT if t else x for x, t in zip(made, trans, strict=True))


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


# ---- in ops/gemm.py -----------------------------------------------------------------------------

ACCUMULATE = Shape("accumulate", 24, 16, 40, "TN", torch.float32, accumulate=True)
FORWARD = Shape("forward", 24, 16, 40, "NT")
CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [FORWARD, ACCUMULATE], ids=lambda shape: shape.name)
def test_the_timed_algorithm_is_the_verified_one(fake: Fake, shape: Shape) -> None:
    fake.times_ms = 0.5, 0.25, 0.75
    given = gemm.Operands.of(shape, torch.float16, CPU)
    sets = [given, given.clone(), given.clone()]
    provider, line = gemm.by_cublaslt(shape, torch.float16, sets)
    fake.launched.clear()
    for _ in sets:
        provider.launch()
    outs = {arguments[10].value for arguments in fake.launched}
    assert len(outs) == (3 if shape.accumulate else 1), "a result's memory is used again"
    fresh = gemm.Operands.of(shape, torch.float16, CPU)
    assert gemm.verify(shape, fresh, {"cublaslt": line}) == {}
    assert fake.algorithms == 4 * [1]


# ---- the library itself ------------------------------------------------------------------------


@on_gpu
@every_transpose
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("to_fp32", [False, True])
def test_fastest_on_a_gpu(trans: tuple[bool, bool], dtype: torch.dtype, to_fp32: bool) -> None:
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
def test_fastest_adds_on_a_gpu() -> None:
    a, b = operands((True, False), torch.float16, "cuda")
    outs = [torch.zeros(24, 16, device="cuda") for _ in range(2)]
    product = cublaslt.Product(cublaslt.library(), a, b, outs[0], beta=1.0)
    launch = product.launch(product.fastest([(a, b, outs[0])]), a, b, outs[1])
    for _ in range(3):
        launch()
    assert torch.equal(outs[1].double(), 3 * (a.double() @ b.double()))
