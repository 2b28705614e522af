"""Test that kernels are verified before their first use, and references replace wrong ones."""

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
from amp_ext.verify import FAMILIES, PRODUCTS, cases
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


CASES = len(list(cases("update_scale", "ptx")))


# ---- the comparison ----------------------------------------------------------------------------


FAMILIES_OF_SM80 = [f for f in FAMILIES if f not in PRODUCTS and "sm90" not in f]
FAMILIES_OF_SM90 = [pytest.param(f, marks=pytest.mark.full) for f in FAMILIES if "sm90" in f]


@pytest.mark.parametrize("family", FAMILIES_OF_SM80 + FAMILIES_OF_SM90)
def test_right_kernels_pass(load: Load, family: str) -> None:
    load().set_sm90("sm90" in family)
    assert verify.verify_family("ptx", family, "cpu").failure == ""


def test_memory_around_arguments_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def unscale_(grads: list[Tensor], **others: Tensor) -> None:
        ops.unscale_(grads, **others)
        verify._memory(grads[0])[-1] += 1

    unscale_.reference = ops.unscale_.reference
    (case,) = (case for case in cases("unscale", "ptx") if case.what == "a factor")
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
        _C.gemm_choice(matrix, matrix)  # called by torch.compile without verification
        return x + 1

    compiled(torch.ones(()))
    assert set(callbacks) == {None}


@pytest.mark.parametrize(
    ("error", "tries_again"),
    [("CUDA out of memory", True), ("a stream is capturing", True), ("no C compiler", False)],
)
def test_what_says_nothing_of_a_kernel(
    load: Load, monkeypatch: pytest.MonkeyPatch, error: str, tries_again: bool
) -> None:
    """After an unrelated error the reference runs, and the next call or process verifies."""

    def fail(*arguments: object) -> None:
        raise RuntimeError(error)

    library = load()
    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        patch.setattr(verify, "compare", fail)
        update_scale()
    assert [error in str(warning.message) for warning in warned] == [True] * (not tries_again)
    update_scale()
    assert library.calls("update_scale") == (CASES + 1) * tries_again
    library = load()
    update_scale()
    assert library.calls("update_scale") == (1 if tries_again else CASES + 1)


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


def train(scaler_class: type[torch.amp.GradScaler]) -> list[float]:
    """Return a parameter and the scale after some steps, one of them with an overflow."""
    parameter = torch.tensor([3.0, 4.0, 5.0], requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = scaler_class("cpu", init_scale=2.0**10)
    for factor in (1.0, torch.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale(parameter.square().sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    return [*parameter.tolist(), scaler.get_scale()]


def test_the_reference_runs_in_place_of_a_wrong_kernel(
    load: Load, broken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library = load(broken)
    with pytest.warns(RuntimeWarning) as warned:
        ours = train(amp_ext.GradScaler)
    assert ours == train(torch.amp.GradScaler)
    (warning,) = {str(warning.message) for warning in warned}
    for words in ("ptx kernels of unscale", "on cpu", "unscale_, ", "python -m amp_ext"):
        assert words in warning
    calls = library.calls("unscale")
    assert calls <= len(list(cases("unscale", "ptx")))
    train(amp_ext.GradScaler)
    assert library.calls("unscale") == calls
    assert library.calls("update_scale") == CASES + 6  # right, and so in use

    assert doctor.main() == 1
    said = capsys.readouterr().out
    assert said.count("FAIL  ") == 2
    assert "  FAIL  ptx kernels of unscale on cpu: unscale_, " in said
    assert "  FAIL  ptx kernels of gemm_sm80_f16 on cpu: gemm, " in said
    assert said.count("  ok    ptx kernels of ") == len(FAMILIES_OF_SM80) - 2


ALIGNED, UNALIGNED = torch.ones(64, 72).half()[:, :64], torch.ones(64, 65).half()[:, 1:]


def kernel_of_product(library: Ptx, a: Tensor) -> str:
    """Return the kernel that computes a @ a, empty if torch does."""
    before = library.calls("gemm")
    assert (ops.gemm(a, a) == 64).all()
    if library.calls("gemm") == before:
        return ""
    return "sm90" if "sm90" in library.plan() else "sm80"


@pytest.mark.parametrize(
    ("wrong", "right", "unaligned"), [("sm80", "sm90", ""), ("sm90", "sm80", "sm80")]
)
def test_a_wrong_kernel_of_products_leaves_the_other(
    load: Load, monkeypatch: pytest.MonkeyPatch, wrong: str, right: str, unaligned: str
) -> None:
    """If one kernel is wrong, the other runs and is measured. TMA loads no unaligned operands."""

    def verify_family(backend: str, family: str, device: str) -> verify.Result:
        return verify.Result("wrong" if wrong in family else "", "today")

    monkeypatch.setattr(verify, "verify_family", verify_family)
    library = load()
    library.set_sm90(True)
    with pytest.warns(RuntimeWarning, match=f"gemm_{wrong}_f16 did not pass") as warned:
        chosen = [kernel_of_product(library, a) for a in (ALIGNED, UNALIGNED)]
    assert chosen == [right, unaligned]
    assert len(warned) == 1

    assert _C.start_noting()
    ops.gemm(ALIGNED, torch.ones(64, 256).half())
    (product,) = _C.stop_noting()
    variants = [variant for name, variant in product.candidates(False) if name == "ptx"]
    assert {("sm80", "sm90")[variant % 2] for variant in variants if variant} == {right}


def test_a_driver_without_tensor_maps_turns_off_sm90_alone(load: Load) -> None:
    library = load()
    library.set_sm90(True)
    library.refuse_tensor_maps(True)
    with pytest.warns(RuntimeWarning, match=r"gemm_sm90_f16 cannot run.*tensor map"):
        ops.gemm(ALIGNED, ALIGNED)
    assert kernel_of_product(library, ALIGNED) == "sm80"


@pytest.mark.parametrize("family", [family for family in FAMILIES if family[:4] != "gemm"])
def test_the_ops_that_run_instead(load: Load, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = load()
    monkeypatch.setattr(verify, "may_run", lambda *arguments: None)
    for case in cases(family, "ptx"):
        verify.compare(case, CPU)
    assert library.calls(family) == 0


# ---- the record --------------------------------------------------------------------------------


def test_results_are_remembered(load: Load) -> None:
    load()
    assert verify.may_run("ptx", "update_scale", "cpu", True) is None, "as within a capture"
    update_scale()
    library = load()
    update_scale()
    assert library.calls("update_scale") == 1
    assert verify.may_run("ptx", "update_scale", "cpu", True)
    families = ("update_scale", "gemm_sm80_f16", "gemm_sm90_f16")
    failed = [(f"ptx {family}", "it is off", "yesterday") for family in families]
    _cache.append("cpu", "verified", failed)
    library = load()
    with pytest.warns(RuntimeWarning, match="update_scale .*it is off"):
        update_scale()
    half = torch.zeros(4, 4, dtype=torch.float16)
    with pytest.warns(RuntimeWarning, match="gemm_sm80_f16 .*it is off"):
        assert _C.gemm_choice(half, half)[0] == "cpu"
    with warnings.catch_warnings():
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
    products = [case.arguments for case in cases("gemm_f16", "triton")]
    assert any({"c", "bias", "alpha", "beta"} <= arguments.keys() for arguments in products)
    assert any(arguments.get("sum_batch") for arguments in products)
    assert any(arguments["a"].shape[-1] % 2 for arguments in products)
