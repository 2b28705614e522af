"""Test that kernels are verified before their first use, and wrong ones do not run."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.multiprocessing.reductions import StorageWeakRef

import amp_ext
from amp_ext import _C, _cache, ops, verify
from amp_ext import __main__ as doctor
from amp_ext.verify import FAMILIES, cases
from executors import CPU
from ptx_backend import build
from ptx_backend.backend import ARCHITECTURE, Ptx

Load = Callable[..., Ptx]
pytestmark = pytest.mark.ptx


@pytest.fixture
def load(ptx: Ptx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Load ptx as a process that starts would: nothing but the record is known of its kernels."""
    monkeypatch.setenv("AMP_EXT_VERIFY", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(verify, "_warned", set())
    original = ptx.functions._name

    def load(library: str | Path = original) -> Ptx:
        monkeypatch.setattr(verify, "_known", {})
        copy = shutil.copy(library, tmp_path / f"{len(list(tmp_path.glob('*.so')))}.so")
        loaded = Ptx(str(copy))
        _C.use_backend("cpu", "ptx")
        return loaded

    yield load
    _C.load_backend(original)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a library whose unscale_ never reports an overflow, and that transposes b."""
    if reason := build.missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("broken")
    edits = {
        "lists_unscale": (r"^.*\batom\..*$", ""),
        "sm80_gemm_f16": (r"(ldmatrix\S*)\.trans\b", r"\1"),
    }
    return build.edited(ARCHITECTURE, folder, edits)


def update_scale() -> None:
    """Run an op that is verified in a few milliseconds, and expect its result."""
    scale = torch.tensor(4.0)
    ops.update_scale_(scale, torch.tensor(0, dtype=torch.int32), [torch.tensor(1.0)], 2.0, 0.5, 9)
    assert scale.item() == 2.0


def raising(error: str) -> Callable[..., None]:
    def fail(*arguments: object) -> None:
        raise RuntimeError(error)

    return fail


refused = pytest.raises(RuntimeError, match="no kernels of this op have passed")
CASES = len(list(cases("update_scale", "ptx", CPU)))


# ---- the comparison ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_right_kernels_pass(load: Load, family: str) -> None:
    load()
    assert verify.verify_family("ptx", family, "cpu").failure == ""


def test_memory_around_arguments_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def unscale_(grads: list[Tensor], **others: Tensor) -> None:
        ops.unscale_(grads, **others)
        verify._memory(grads[0])[-1] += 1

    unscale_.reference = ops.unscale_.reference
    (case,) = (case for case in cases("unscale", "ptx", CPU) if case.what == "a factor")
    monkeypatch.setattr(verify, "ops", SimpleNamespace(unscale_=unscale_))
    with pytest.raises(
        verify.WrongResult, match=r"the memory around grads\[\d+\] is not as it was"
    ):
        verify.compare(case, CPU)


def test_modes_of_the_caller_do_not_matter(load: Load) -> None:
    load()
    grads, found_inf, inv_scale = [torch.ones(3)], torch.zeros(()), torch.tensor(0.5)
    random = torch.get_rng_state()
    torch.set_flush_denormal(True)
    try:
        with torch.inference_mode(), torch.device("meta"), torch.autocast("cpu"):
            ops.unscale_(grads, found_inf, inv_scale)
    finally:
        torch.set_flush_denormal(False)
    assert grads[0].tolist() == [0.5] * 3
    assert verify.known("cpu")["ptx unscale"].failure == ""
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.filterwarnings("ignore:Dynamo does not know")
def test_torch_compile_does_not_trace_it(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    load()
    callbacks = []

    def may_run(*arguments: object) -> bool:
        callbacks.append(get_eval_frame_callback())
        return True

    monkeypatch.setattr(verify, "may_run", may_run)
    matrix = torch.ones(8, 8).half()

    @torch.compile(backend="eager")
    def compiled(x: Tensor) -> Tensor:
        _C.Product(matrix, matrix).choose()  # called by torch.compile without verification
        return x + 1

    compiled(torch.ones(()))
    assert set(callbacks) == {None}


@pytest.mark.parametrize("error", ["CUDA out of memory", "a stream is capturing"])
def test_what_says_nothing_of_a_kernel(
    load: Load, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    """After an unrelated error the kernel runs, and the next call verifies it."""
    library = load()
    with monkeypatch.context() as patch:
        patch.setattr(verify, "compare", raising(error))
        update_scale()
    assert library.calls("update_scale") == 1
    update_scale()
    assert library.calls("update_scale") == CASES + 2


def test_kernels_that_cannot_run_are_tried_by_the_next_process(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    load()
    with monkeypatch.context() as patch:
        patch.setattr(verify, "compare", raising("no C compiler"))
        with pytest.warns(RuntimeWarning, match="cannot run on cpu: .*no C compiler"), refused:
            update_scale()
    with refused:
        update_scale()
    library = load()
    update_scale()
    assert library.calls("update_scale") == CASES + 1


def test_gradients_outlive_it(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients outlive a verification while other threads run and may free them."""
    load()
    parameter = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = amp_ext.GradScaler("cpu")
    scaler.scale(parameter.sum()).backward()
    memory = StorageWeakRef(parameter.grad.untyped_storage())

    def may_run(*arguments: object) -> bool:
        parameter.grad = None
        assert not memory.expired()
        return True

    monkeypatch.setattr(verify, "may_run", may_run)
    scaler.unscale_(optimizer)
    assert parameter.grad is None


def test_a_wrong_kernel_does_not_run(
    load: Load, broken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library = load(broken)
    given = [torch.tensor([torch.inf])], torch.zeros(()), torch.tensor(0.5)
    with pytest.warns(RuntimeWarning) as warned, refused:
        ops.unscale_(*given)
    (warning,) = {str(warning.message) for warning in warned}
    for words in ("ptx kernels of unscale", "on cpu", "unscale_, ", "python -m amp_ext"):
        assert words in warning
    calls = library.calls("unscale")
    with refused:
        ops.unscale_(*given)
    assert library.calls("unscale") == calls
    update_scale()
    assert library.calls("update_scale") == CASES + 1, "right, and so in use"

    assert doctor.main() == 1
    said = capsys.readouterr().out
    assert "  FAIL  ptx kernels of unscale on cpu: unscale_, " in said
    assert "  FAIL  ptx kernels of gemm_f16 on cpu: gemm, " in said
    assert said.count("  ok    ptx kernels of ") == len(FAMILIES) - 2


# ---- the record --------------------------------------------------------------------------------


def test_results_are_remembered(load: Load) -> None:
    load()
    assert verify.may_run("ptx", "update_scale", "cpu", True) is None, "as within a capture"
    update_scale()
    library = load()
    update_scale()
    assert library.calls("update_scale") == 1
    assert verify.may_run("ptx", "update_scale", "cpu", True)
    failed = [
        (f"ptx {family}", "it is off", "yesterday") for family in ("update_scale", "gemm_f16")
    ]
    _cache.append("cpu", "verified", failed)
    library = load()
    with pytest.warns(RuntimeWarning, match="update_scale .*it is off"), refused:
        update_scale()
    half = torch.zeros(4, 4, dtype=torch.float16)
    with pytest.warns(RuntimeWarning, match="gemm_f16 .*it is off"):
        assert _C.Product(half, half).choose()[0] == "cpu"
    with warnings.catch_warnings(), refused:
        warnings.simplefilter("error")
        update_scale()
    assert library.calls("update_scale") == 0


@pytest.mark.parametrize(
    ("variable", "value", "calls"),
    [("XDG_CACHE_HOME", "/dev/null", CASES + 1), ("AMP_EXT_VERIFY", "0", 1)],
)
def test_neither_folder_nor_verification_is_needed(
    load: Load, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, calls: int
) -> None:
    library = load()
    monkeypatch.setenv(variable, value)
    update_scale()
    assert library.calls("update_scale") == calls


def test_triton_has_all_kinds_of_products() -> None:
    """Triton's kernels are verified with addends, a sum of several products, and odd sizes."""
    products = [case.arguments for case in cases("gemm_f16", "triton", CPU)]
    assert any({"c", "bias", "alpha", "beta"} <= arguments.keys() for arguments in products)
    assert any(arguments.get("sum_batch") for arguments in products)
    assert any(arguments["a"].shape[-1] % 2 for arguments in products)
