"""Test amp_ext.tune() and products by its table."""

import json
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import amp_ext
import programs
from amp_ext import _C, _cache, ops, verify
from executors import CUDA
from fake_cuda.recorder import cost

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
HAS_CUDA = torch.cuda.is_available() and _C.cuda_built()
# The module: amp_ext.tune is its function.
tune = sys.modules["amp_ext.tune"]
UNMEASURED = "16-bit or FP32 operands on a CPU"


@pytest.fixture(autouse=True)
def file(backend: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the path of the CPU's table, which does not exist; products use each table."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tune, "_own", {})
    before = _C.gemm_mode()
    _C.set_gemm_mode("auto")
    _C.set_measured("cpu", {})
    yield _cache.path("cpu")
    _C.set_gemm_mode(before)
    for device in ("cpu", *["cuda:0"] * HAS_CUDA):
        _C.set_measured(device, {})


two_ways = pytest.mark.skipif(
    not torch.backends.mkl.is_available(), reason="FP16 has one candidate without MKL"
)


def small_products() -> tuple[Tensor, Tensor]:
    """Return a batch of products that take MKL's FP16 GEMM several times as long as the default."""
    return torch.randn(300, 4, 8).to(FP16), torch.randn(300, 8, 4).to(FP16)


def noted(call: Callable[..., object], *arguments: object, **options: object) -> Any:
    with tune._Noting() as noting:
        call(*arguments, **options)
    (product,) = noting.products.values()
    return product


def entry(product: Any, backend: str, variant: int) -> Any:
    return (str(product), *product.key, backend, variant, "a test says so")


def reload() -> None:
    """Read the table as a process does that starts."""
    tune._own.clear()
    tune.load_table("cpu")


@two_ways
def test_a_table_that_lies_is_corrected() -> None:
    """The next tune() corrects a wrong entry; entries it does not measure stay."""
    a, b = small_products()
    products = noted(ops.gemm, a, b), noted(ops.gemm, a[0], b[0])
    tune.update_table("cpu", [entry(product, "cpu", 1) for product in products])
    assert _C.Product(a, b).choose() == ("cpu", "a test says so")
    with amp_ext.tune() as results:
        ops.gemm(a, b)
        ops.gemm(a, b)
    assert [(r.backend, r.variant, r.calls) for r in results] == [("cpu", 0, 2)]
    reload()
    assert _C.Product(a, b).choose() == ("cpu", "measured: nothing is faster than the default")
    assert _C.Product(a[0], b[0]).choose() == ("cpu", "a test says so")


@two_ways
def test_the_fastest_candidate_becomes_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {("cpu", 0): 3.0, ("cpu", 1): 2.0}
    monkeypatch.setattr(tune, "_interleaved", lambda *_: times)
    a, b = small_products()
    with amp_ext.tune() as results:
        expected = ops.gemm(a, b)
    assert results == [("300 x [4, 8] @ [8, 4], float16 @ float16", 1, "cpu", 1, 3.0, 2.0)]
    assert _C.Product(a, b).choose() == ("cpu", "measured: 1.50 times as fast as the default")
    torch.testing.assert_close(ops.gemm(a, b), expected, rtol=2**-10, atol=2**-20)
    for mode in ("kernel", "library"):
        _C.set_gemm_mode(mode)
        assert _C.Product(a, b).choose() == ("cpu", UNMEASURED)
    _C.set_gemm_mode("auto")
    times["cpu", 1] = 2.95
    with amp_ext.tune():
        ops.gemm(a, b)
    assert _C.Product(a, b).choose()[1].startswith("measured: nothing"), "that is noise"
    passes = iter([times | {("cpu", 0): seconds} for seconds in (9.0, 1.0, 9.0)])
    monkeypatch.setattr(tune, "_interleaved", lambda *_: next(passes))
    with amp_ext.tune() as results:
        ops.gemm(a, b)
    assert [(r.variant, r.before, r.after) for r in results] == [(0, 1.0, 1.0)], "the best pass"


def test_products_that_differ_in_anything_are_different() -> None:
    def key(*operands: Tensor, call: Callable[..., object] = ops.gemm, **options: object) -> tuple:
        return tuple(noted(call, *operands, **options).key)

    a, b, c = torch.randn(16, 24).to(FP16), torch.randn(24, 8).to(FP16), torch.randn(16, 8)
    vector = torch.randn(8)
    threads = torch.get_num_threads()
    keys = [
        key(a, b),
        key(a.to(BF16), b),
        key(a, b, out_dtype=FP32),
        key(a.t().contiguous().t(), b),
        key(torch.randn(1 + a.numel()).to(FP16)[1:].view(16, 24), b),
        key(a, torch.randn(24, 16).to(FP16)[:, ::2]),
        key(a, b, c=c),
        key(c, a, b, call=ops.gemm_accumulate_),
        key(a, b, bias=vector),
        key(a, b, alpha=0.5),
        key(a.expand(3, 16, 24), b.expand(3, 24, 8)),
        key(a.expand(3, 16, 24), b.expand(3, 24, 8), sum_batch=True),
        key(a[:8], b),
    ]
    torch.set_num_threads(threads + 1)
    try:
        keys.append(key(a, b))
    finally:
        torch.set_num_threads(threads)
    assert len(set(keys)) == len(keys)
    assert key(a.clone(), b.clone()) == keys[0]


@two_ways
@pytest.mark.parametrize("wrong", ["result", "later result", "raises"])
def test_a_wrong_candidate_is_left_out(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate that was wrong once is not chosen, however fast it is."""
    others: list[tuple[str, int]] = []

    class BrokenTrial(tune._Trial):
        def result(self, candidate: tuple[str, int]) -> Tensor:
            result = super().result(candidate)
            if candidate != ("cpu", 0):
                others.append(candidate)
                if wrong == "raises":
                    raise RuntimeError("out of registers")
                result.view(-1)[-1] += wrong == "result" or len(others) > 1
            return result

    monkeypatch.setattr(tune, "_Trial", BrokenTrial)
    # The last candidate is the fastest.
    monkeypatch.setattr(
        tune, "_interleaved", lambda _, right, __: {c: 9.0 - i for i, c in enumerate(right)}
    )
    words = "cpu: out of registers" if wrong == "raises" else "a wrong result of 300 x"
    with pytest.warns(UserWarning, match=words), amp_ext.tune() as measured:
        ops.gemm(*small_products())
    chosen = [(result.backend, result.variant) for result in measured]
    assert chosen == ([] if wrong == "raises" else [("cpu", 0)])


@two_ways
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_all_candidates_compute_the_same(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All candidates compute the same without a warning, on random numbers of their own.

    Each product is measured, even if the default alone takes longer than a pass.
    """
    monkeypatch.setattr(tune, "PASS_SECONDS", 1e-9)
    a, b = (operand.to(dtype) for operand in small_products())
    c = torch.randn(300, 4, 4)
    with amp_ext.tune() as results:
        ops.gemm(a, b, bias=c[0, 0])
        ops.gemm(a, b, c=c)
        ops.gemm_accumulate_(c, a, b)
        state, before = torch.get_rng_state(), c.clone()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(c, before)
    assert len(results) == 3


@pytest.mark.fake_cuda
def test_plans_of_the_kernels_are_candidates() -> None:
    a, b = (torch.randn(size).to(CUDA, FP16) for size in ((48, 64), (64, 40)))
    product = noted(ops.gemm, a, b)
    candidates = _C.Product(a, b).candidates(triton=False)
    variants = [variant for backend, variant in candidates if backend == "cuda"]
    assert candidates[0] == ("library", 0)
    assert len(set(variants)) == len(variants) > 2
    plans, results = set(), []
    for variant in variants:
        tune.update_table("cuda:0", [entry(product, "cuda", variant)])
        assert _C.Product(a, b).choose()[0] == "cuda"
        counted = cost(lambda: results.append(ops.gemm(a, b)))
        torch.testing.assert_close(
            results[-1].float(), a.float() @ b.float(), rtol=2**-10, atol=2**-10
        )
        plans.add((counted.kernel, counted.blocks, counted.bytes_stored))
    assert len(plans) == len(variants)
    wide = a.float(), b.float()
    tune.update_table("cuda:0", [entry(noted(ops.gemm, *wide), "cuda", 0)])
    assert _C.Product(*wide).choose()[0] == "library", "an entry that cannot be right"
    for chosen, measured in (("cuda", "cuda"), ("", "cuda"), ("triton", "library")):
        _C.use_backend("cuda", chosen)
        assert _C.Product(a, b).choose()[0] == measured


def changed(change: Callable[[list[Any]], Any]) -> Callable[[Path], object]:
    """Return a function that changes a table's line, and leaves the next line unfinished."""

    def damage(file: Path) -> None:
        whole = file.read_text()
        file.write_text(json.dumps(change(json.loads(whole))) + whole[:-9])

    return damage


DAMAGES: dict[str, Callable[[Path], object]] = {
    "deep": lambda file: file.write_text("[" * 200_000),
    "not utf8": lambda file: file.write_bytes(b"\xff\n"),
    "short": changed(lambda line: line[:-1]),
    "another part": changed(lambda line: ["verified", *line[1:]]),
    "key": changed(lambda line: [*line[:2], "1", *line[3:]]),
    "key beyond int64": changed(lambda line: [*line[:2], 2**70, *line[3:]]),
    "backend": changed(lambda line: [*line[:-3], "hip", *line[-2:]]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_no_table(damage: str, file: Path) -> None:
    """A damaged line counts as none, and the next measurement is read again."""
    a, b = small_products()
    products = [entry(noted(ops.gemm, a, b), "cpu", 1)]
    tune.update_table("cpu", products)
    DAMAGES[damage](file)
    reload()
    assert _C.Product(a, b).choose() == ("cpu", UNMEASURED)
    tune.update_table("cpu", products)
    reload()
    assert _C.Product(a, b).choose() == ("cpu", "a test says so")


def test_another_torch_driver_or_build_has_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (library := tmp_path / "library.so").touch()
    monkeypatch.setattr("amp_ext._library.LIBRARIES", [library])
    monkeypatch.setattr(_cache, "device_name", str)
    monkeypatch.setattr(_cache, "_identity", _cache._identity.__wrapped__)
    files = [_cache.path("cuda")]
    monkeypatch.setattr("torch.__version__", "0.0.9")
    files.append(_cache.path("cuda"))
    monkeypatch.setattr(_cache, "driver", lambda: "9")
    files.append(_cache.path("cuda"))
    os.utime(library, (1, 1))
    assert len({*files, _cache.path("cuda")}) == 4
    before = _cache.path("cpu")
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx2": True})
    assert _cache.path("cpu") != before


def test_a_cache_folder_without_an_absolute_path_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/cache")
    assert _cache.folder() == tmp_path / ".cache" / "amp_ext"


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_processes_that_write_at_once_keep_all_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    product = noted(ops.gemm, *small_products())
    monkeypatch.setattr(verify, "_known", {})

    def write(process: int) -> None:
        for i in range(40):
            key = [*product.key[:-1], 1000 * process + i]
            tune.update_table("cpu", [("", *key, "cpu", 2, "a test says so")])
            _cache.append("cpu", "verified", [(f"cpu {process} {i}", "", "today")])

    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=write, args=(i,)) for i in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    assert tune.load_table("cpu") == 160
    assert len(verify.known("cpu")) == 160


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the folder is not writable, the process keeps its own measurements."""
    (tmp_path / "amp_ext").write_text("a file")
    a, b = small_products()
    for operands in ((a, b), (b, a)):
        product = noted(ops.gemm, *operands)
        with pytest.warns(UserWarning, match="cannot write measurements"):
            tune.update_table("cpu", [entry(product, "cpu", 1)])
    assert _C.Product(a, b).choose() == _C.Product(b, a).choose() == ("cpu", "a test says so")


def test_a_script_that_trains_in_several_processes(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tune() refuses a script of several processes, by their group or the launcher's variable."""
    monkeypatch.setenv("WORLD_SIZE", "")
    with pytest.raises(RuntimeError, match="in one process before it"), amp_ext.tune():
        ops.gemm(*small_products())
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    torch.distributed.destroy_process_group()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="in one process before it"), amp_ext.tune():
        pytest.fail("the region was entered")
    assert not file.exists()


def test_regions_do_not_nest_and_errors_leave_them() -> None:
    with pytest.raises(RuntimeError, match="within another"), amp_ext.tune(), amp_ext.tune():
        pass
    with pytest.raises(ValueError, match="seconds must be positive, got 0"), amp_ext.tune(0):
        pass
    with pytest.raises(ZeroDivisionError), amp_ext.tune():
        raise ZeroDivisionError
    assert noted(ops.gemm, *small_products()).calls == 1


def run(*command: str) -> str:
    """Run a process that computes products by the table, without Triton; return its output."""
    variables = {"AMP_EXT_GEMM": "auto", "AMP_EXT_BACKEND": "cuda" if HAS_CUDA else "cpu"}
    variables["PYTHONPATH"] = str(Path(amp_ext.__file__).parents[1])
    done = programs.run(*command, **variables)
    return f"{done.stdout}{done.stderr}{done.returncode}"


@pytest.mark.parametrize("device", ["cpu", "cuda"] if HAS_CUDA else ["cpu"])
def test_a_script(device: str, tmp_path: Path) -> None:
    """The next process uses the measurements of a script."""
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, sys, torch\nfrom amp_ext import _C, ops\n"
        "a = torch.ones(100, 4, 8, dtype=torch.half, device=sys.argv[1])\n"
        "ops.gemm(a, a.mT)\nprint(__name__, _C.Product(a, a.mT).choose()[1])\n"
        "sys.exit(3 if signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN else 4)\n"
    )
    said = run("-m", "amp_ext", "tune", str(script), device)
    unmeasured = UNMEASURED if device == "cpu" else "not measured: torch's library"
    assert said.startswith(f"__main__ {unmeasured}\namp_ext.tune: 1 of 1 products measured")
    assert said.endswith("\n3")
    assert re.fullmatch(r"__main__ measured: .*\n3", run(str(script), device))


@pytest.mark.skipif(not HAS_CUDA, reason="needs the CUDA kernels and a device")
@pytest.mark.parametrize("where", ["backward", "capture"])
def test_the_first_product_reads_the_table_wherever_it_is_cuda(where: str) -> None:
    """The first product reads the table in a thread without the GIL, and within a capture."""
    a = torch.randn(16, 16, device="cuda").half()
    product = noted(ops.gemm, a, a.clone())
    candidates = _C.Product(a, a.clone()).candidates(triton=False)
    variant = [variant for backend, variant in candidates if backend == "cuda"][-1]
    tune.update_table("cuda:0", [entry(product, "cuda", variant)])
    code = """
import sys, torch, warnings
from amp_ext import _C, ops
warnings.filterwarnings("ignore", "Attempting to run cuBLAS")  # of torch in a new thread
a, b = (torch.ones(16, 16, device="cuda").half().requires_grad_() for _ in range(2))
_C.set_gemm_mode("library")
result = ops.gemm(a, b)
torch.cuda.synchronize()
_C.set_gemm_mode("auto")
if sys.argv[1] == "backward":
    result.backward(torch.ones_like(result))
    result = b.grad
else:
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):  # a waiting call would end the capture
        result = ops.gemm(a, b)
    graph.replay()
print(*_C.Product(a, b).choose(), result.sum().item())
"""
    assert run("-c", code, where) == f"cuda a test says so {16.0**3}\n0"
    _C.set_measured("cuda:0", {})


@pytest.mark.parametrize("device", ["cpu", "cuda"] if HAS_CUDA else ["cpu"])
@pytest.mark.parametrize("compiles", [False, True])
def test_all_products_of_a_step_are_noted(device: str, compiles: bool) -> None:
    """Products of backward passes and of compiled functions are noted, failing calls are not."""
    a, b = (torch.randn(16, 16, device=device).half().requires_grad_() for _ in range(2))

    def product(a: Tensor, b: Tensor) -> Tensor:
        return ops.gemm(a, b)

    run = torch.compile(product, backend="aot_eager", fullgraph=True) if compiles else product
    with tune._Noting() as noting:
        run(a, b).sum().backward()
        with pytest.raises(RuntimeError, match="c must have the shape"):
            ops.gemm_accumulate_(torch.zeros(4, 4, device=device), a.detach(), b.detach())
    assert sum(product.calls for product in noting.products.values()) == 3
