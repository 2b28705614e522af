"""Test that kernels are verified before their first use, and wrong ones do not run."""

import os
import re
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.multiprocessing.reductions import StorageWeakRef

import amp_ext
import programs
from amp_ext import _C, _cache, ops, verify
from amp_ext.ops.gemm import product_cases
from amp_ext.verify import FAMILIES, cases
from executors import CPU, CUDA
from fake_cuda.recorder import cost
from planner import gemm_tiles

Run = Callable[[Callable[[], Any]], Any]
Start = Callable[[], Run]
pytestmark = pytest.mark.fake_cuda


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Return a function that starts a thread, as a process: it knows only the record of kernels.

    No kernels of Triton run. A started thread runs functions.
    """
    may_run = verify.may_run
    monkeypatch.setenv("AMP_EXT_VERIFY", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(verify, "_warned", set())
    monkeypatch.setattr(verify, "may_run", lambda name, *of: name == "cuda" and may_run(name, *of))

    def start() -> Run:
        monkeypatch.setattr(verify, "_known", {})
        thread = ThreadPoolExecutor(1)
        return lambda function: thread.submit(function).result()

    return start


def update_scale() -> None:
    """Run an op that is verified in a few milliseconds, and expect its result."""
    scale, overflow = torch.tensor(4.0, device=CUDA), torch.tensor(1.0, device=CUDA)
    tracker = torch.tensor(0, dtype=torch.int32, device=CUDA)
    ops.update_scale_(scale, tracker, [overflow], 2.0, 0.5, 9)
    assert scale.item() == 2.0


def calls(run: Run) -> int:
    """Return how many launches a call of update_scale_ takes, with its verification."""
    return cost(run, update_scale).launches


def raising(error: str) -> Callable[..., None]:
    def fail(*arguments: object) -> None:
        raise RuntimeError(error)

    return fail


refused = pytest.raises(RuntimeError, match="no kernels of this op have passed")
CASES = len(list(cases("update_scale", "cuda", CPU)))


# ---- the comparison ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["unscale", "gemm_f16"])
def test_right_kernels_pass(start: Start, family: str) -> None:
    """The kernels that test_a_wrong_kernel_does_not_run breaks pass; there the others do."""
    start()
    assert verify.verify_family("cuda", family, "cuda:0").failure == ""


def test_memory_around_arguments_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def unscale_(grads: list[Tensor], **others: Tensor) -> None:
        ops.unscale_(grads, **others)
        verify._memory(grads[0])[-1] += 1

    unscale_.reference = ops.unscale_.reference
    (case,) = (case for case in cases("unscale", "cuda", CUDA) if case.what == "a factor")
    monkeypatch.setattr(verify, "ops", SimpleNamespace(unscale_=unscale_))
    with pytest.raises(
        verify.WrongResult, match=r"the memory around grads\[\d+\] is not as it was"
    ):
        verify.compare(case, CUDA)


def test_modes_of_the_caller_do_not_matter(start: Start) -> None:
    values = torch.ones(3, device=CUDA), torch.zeros((), device=CUDA), torch.ones((), device=CUDA)

    def unscale() -> None:
        random = torch.get_rng_state()
        torch.set_flush_denormal(True)
        with torch.inference_mode(), torch.device("meta"), torch.autocast("cuda"):
            ops.unscale_([values[0]], values[1], values[2] / 2)
        assert torch.equal(torch.get_rng_state(), random)

    start()(unscale)
    assert values[0].tolist() == [0.5] * 3
    assert verify.known("cuda:0")["cuda unscale"].failure == ""


@pytest.mark.filterwarnings("ignore:Dynamo does not know")
def test_torch_compile_does_not_trace_it(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    callbacks = []

    def may_run(*arguments: object) -> bool:
        callbacks.append(get_eval_frame_callback())
        return True

    run = start()
    monkeypatch.setattr(verify, "may_run", may_run)
    matrix = torch.ones(8, 8, device=CUDA).half()

    @torch.compile(backend="eager")
    def compiled(x: Tensor) -> Tensor:
        _C.Product(matrix, matrix).choose()  # called by torch.compile without verification
        return x + 1

    run(lambda: compiled(torch.ones(())))
    assert set(callbacks) == {None}


@pytest.mark.parametrize("error", ["CUDA out of memory", "a stream is capturing"])
def test_what_says_nothing_of_a_kernel(
    start: Start, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    """After an unrelated error the kernel runs, and the next call verifies it."""
    run = start()
    with monkeypatch.context() as patch:
        patch.setattr(verify, "compare", raising(error))
        assert calls(run) == 1
    assert calls(run) == CASES + 1


def test_kernels_that_cannot_run_are_tried_by_the_next_process(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start()
    with monkeypatch.context() as patch:
        patch.setattr(verify, "compare", raising("no C compiler"))
        with pytest.warns(RuntimeWarning, match="cannot run on cuda:0: .*no C compiler"), refused:
            run(update_scale)
    with refused:
        run(update_scale)
    assert calls(start()) == CASES + 1


def test_gradients_outlive_it(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients outlive a verification while other threads run and may free them."""
    parameter = torch.ones(3, requires_grad=True, device=CUDA)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = amp_ext.GradScaler("cuda")
    scaler.scale(parameter.sum()).backward()
    memory = StorageWeakRef(parameter.grad.untyped_storage())

    def may_run(*arguments: object) -> bool:
        parameter.grad = None
        assert not memory.expired()
        return True

    run = start()
    monkeypatch.setattr(verify, "may_run", may_run)
    run(lambda: scaler.unscale_(optimizer))
    assert parameter.grad is None


# unscale_ never reports an overflow, and the products transpose b.
EDITS = {
    "lists_unscale": (r"^.*\batom\..*$", ""),
    "sm80_gemm_f16": (r"(ldmatrix\S*)\.trans\b", r"\1"),
}
USE_OF_BROKEN_KERNELS = """
    import pytest, torch
    from amp_ext import __main__ as doctor, ops, verify
    from fake_cuda.recorder import cost

    may_run = verify.may_run
    verify.may_run = lambda name, *others: name == "cuda" and may_run(name, *others)
    one = torch.ones((), device="cuda")

    def unscale():
        with pytest.raises(RuntimeError, match="no kernels of this op have passed"):
            ops.unscale_([torch.full((1,), torch.inf, device="cuda")], one * 0, one / 2)

    with pytest.warns(RuntimeWarning) as warned:
        unscale()
    (warning,) = {str(warning.message) for warning in warned}
    for words in ("cuda kernels of unscale", "on cuda:0", "unscale_, ", "python -m amp_ext"):
        assert words in warning
    assert cost(unscale).launches == 0
    tracker = torch.zeros((), dtype=torch.int32, device="cuda")
    ops.update_scale_(one, tracker, [one.clone()], 2.0, 0.5, 9)
    assert one.item() == 0.5, "right, and so in use"
    assert doctor.main() == 1
    """


def test_a_wrong_kernel_does_not_run(tmp_path: Path) -> None:
    ptx = tmp_path / "ptx"
    shutil.copytree(os.environ["CUDASIM_PTX"], ptx)
    for name, (pattern, replacement) in EDITS.items():
        path = ptx / f"{name}.ptx"
        text, count = re.subn(pattern, replacement, path.read_text(), flags=re.MULTILINE)
        assert count, f"{name}: nothing matches {pattern}"
        path.write_text(text)
    said = programs.output(
        USE_OF_BROKEN_KERNELS,
        AMP_EXT_VERIFY="1",
        CUDASIM_PTX=str(ptx),
        FAKE_CUDA_DEVICES="1",
        XDG_CACHE_HOME=str(tmp_path),
    )
    assert "  FAIL  cuda kernels of unscale on cuda:0: unscale_, " in said
    assert "  FAIL  cuda kernels of gemm_f16 on cuda:0: gemm, " in said
    assert said.count("  ok    cuda kernels of ") == len(FAMILIES) - 2


# ---- the record --------------------------------------------------------------------------------


def test_results_are_remembered(start: Start) -> None:
    run = start()
    question = "cuda", "update_scale", "cuda:0", True
    assert verify.may_run(*question) is None, "as within a capture"
    run(update_scale)
    assert calls(start()) == 1
    assert verify.may_run(*question)
    families = "update_scale", "gemm_f16"
    failed = [(f"cuda {family}", "it is off", "yesterday") for family in families]
    _cache.append("cuda:0", "verified", failed)
    run = start()
    with pytest.warns(RuntimeWarning, match="update_scale .*it is off"), refused:
        run(update_scale)
    half = torch.zeros(8, 8, dtype=torch.float16, device=CUDA)
    with pytest.warns(RuntimeWarning, match="gemm_f16 .*it is off"):
        assert run(lambda: _C.Product(half, half).choose())[0] == "library"
    with warnings.catch_warnings(), refused:
        warnings.simplefilter("error")
        run(update_scale)


@pytest.mark.parametrize(
    ("variable", "value", "launches"),
    [("XDG_CACHE_HOME", "/dev/null", CASES + 1), ("AMP_EXT_VERIFY", "0", 1)],
)
def test_neither_folder_nor_verification_is_needed(
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    launches: int,
) -> None:
    run = start()
    monkeypatch.setenv(variable, value)
    assert calls(run) == launches


def test_each_tile_is_verified() -> None:
    """Plans compute all products: the planner's choice and two tiles, or all tiles of a kernel."""
    plans = [case.plans for case in product_cases(torch.float16, "cuda", is_sm90=True)]
    assert all(len(set(some)) == len(some) for some in plans)
    tiles = (len(gemm_tiles(sm90)) for sm90 in (False, True))
    assert {len(some) for some in plans} == {3, *tiles, 1}


def test_triton_has_all_kinds_of_products() -> None:
    """Triton's kernels are verified with addends, a sum of several products, and odd sizes."""
    products = [case.arguments for case in cases("gemm_f16", "triton", CPU)]
    assert any({"c", "bias", "alpha", "beta"} <= arguments.keys() for arguments in products)
    assert any(arguments.get("sum_batch") for arguments in products)
    assert any(arguments["a"].shape[-1] % 2 for arguments in products)
