"""Test set_backend and AMP_EXT_BACKEND: a device's backend, and errors without one."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import amp_ext
import programs
from amp_ext import _C, _triton
from amp_ext import backend as backends
from amp_ext.backend import backend_for

pytestmark = pytest.mark.skipif(_triton.triton_version() is None, reason="Triton is not installed")

# The functions of the Triton backend.
TRITON = {
    "unscale_": "amp_ext.triton_kernels.lists.unscale.unscale_",
    "check_finite": "amp_ext.triton_kernels.lists.check_finite.check_finite",
    "cast_": "amp_ext.triton_kernels.lists.cast.cast_",
    "gemm": "amp_ext.triton_kernels.gemm.gemm.gemm",
}


@pytest.fixture(autouse=True)
def gemm_kernels() -> Iterator[None]:
    before = _C.gemm_mode()
    yield
    _C.set_gemm_mode(before)


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set up an installation without a CUDA toolkit, with compiled Triton kernels."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(backends._C, "cuda_built", lambda: False)


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "triton_version", lambda: None)


@pytest.fixture
def interpreted_triton() -> None:
    if not _triton.is_interpreted():
        pytest.skip("TRITON_INTERPRET is not set: with a GPU, kernels are compiled")
    amp_ext.set_backend("triton")


def test_without_a_toolkit_triton_runs_the_list_ops_of_a_gpu(without_kernels: None) -> None:
    _C.set_gemm_mode("kernel")
    amp_ext.set_backend(None)
    assert backend_for("cuda").name == "triton"
    assert backend_for("cpu").name == "cpu"


@pytest.mark.skipif(_C.cuda_built(), reason="this module has CUDA kernels")
def test_without_either_list_ops_are_refused(without_kernels: None, without_triton: None) -> None:
    amp_ext.set_backend(None)
    choice = backend_for("cuda")
    assert choice.name == "none"
    assert "pip install triton" in choice.reason
    assert "FORCE_CUDA=1 pip install" in choice.reason


@pytest.mark.parametrize("interpreted", ["0", "true"])
def test_the_cpu_is_tritons_where_it_is_interpreted(
    interpreted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    amp_ext.set_backend("triton")
    assert backend_for("cpu").name == ("cpu" if interpreted == "0" else "triton")
    on_cuda = backend_for("cuda").name
    assert (on_cuda == "triton") == (interpreted == "0"), "the interpreter has the host's memory"
    amp_ext.set_backend("cpu")
    assert backend_for("cpu").name == "cpu"


@pytest.mark.parametrize(
    ("torch_cuda", "first"), [("13.0", ""), (None, "install a CUDA build of torch, then ")]
)
def test_missing_backends_say_what_to_install(
    torch_cuda: str | None,
    first: str,
    without_kernels: None,
    without_triton: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    amp_ext.set_backend("cpu")
    with pytest.raises(RuntimeError, match=r"Triton is not installed; pip install triton$"):
        amp_ext.set_backend("triton")
    expected = rf"was not built; {first}rebuild amp_ext with: FORCE_CUDA=1 "
    with pytest.raises(RuntimeError, match=expected):
        amp_ext.set_backend("cuda")
    assert amp_ext.get_backend() == "cpu"


def test_versions_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "triton_version", lambda: "3.5.1")
    assert _triton.why_not_triton().endswith("3.5.1 is too old; pip install 'triton>=3.6'")
    monkeypatch.setattr(_triton, "triton_version", lambda: "3.10.0")
    assert not _triton.why_not_triton()


def test_a_folder_of_that_name_is_not_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of that name is a namespace package for Python, not Triton."""
    monkeypatch.setattr(_triton, "find_spec", lambda name: ModuleSpec(name, None))
    assert _triton.triton_version() is None


@pytest.mark.parametrize("op", ["unscale_", "cast_"])
def test_tensors_outlive_a_launch_that_runs_other_threads(
    op: str, interpreted_triton: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host paths of the scaler and of short casts hold no lock while Python runs."""
    parameter = torch.nn.Parameter(torch.ones(1000))
    parameter.grad = torch.ones(1000)
    grads = [parameter.grad]
    memory = StorageWeakRef(parameter.grad.untyped_storage())
    seen = []

    def launch(*arguments: object) -> None:
        def clear() -> None:
            grads.clear()
            parameter.grad = None

        with ThreadPoolExecutor() as pool:
            pool.submit(clear).result()
        seen.append(memory.expired())

    monkeypatch.setattr(TRITON[op], launch)
    if op == "cast_":
        amp_ext.ops.cast_([torch.zeros(1000, dtype=torch.float16)], grads)
    else:
        grads.clear()
        scaler = amp_ext.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        scaler.unscale_(torch.optim.SGD([parameter], lr=1.0))
    assert seen == [False]
    assert memory.expired(), "it is freed after the launch"


def test_environment_variable_chooses() -> None:
    """The variable chooses Triton, which is imported with its first kernel only."""
    program = "import sys, amp_ext; print(amp_ext.get_backend(), "
    program += "amp_ext._C.choose('unscale_', 'cuda'), 'triton' in sys.modules)"
    process = programs.run("-c", program, AMP_EXT_BACKEND="triton", TRITON_INTERPRET="0")
    assert (process.stdout, process.stderr) == ("triton triton False\n", "")


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("AMP_EXT_BACKEND", "hip", "set_backend: name must be"),
        ("AMP_EXT_GEMM", "kernels", "AMP_EXT_GEMM must be auto, kernel or library, got"),
    ],
)
def test_wrong_environment_variable_fails_the_import(variable: str, value: str, words: str) -> None:
    process = programs.run("-c", "import amp_ext", **{variable: value})
    assert process.returncode == 1
    error = process.stderr.splitlines()[-1]
    assert error.startswith(f"ImportError: amp_ext, AMP_EXT_BACKEND or AMP_EXT_GEMM: {words}")


@pytest.mark.parametrize(
    ("too_large", "fits"),
    [
        ((2**31, 1, 64), (2**30, 1, 64)),
        ((1, 2**31, 64), (1, 2**30, 64)),
        ((2**28, 1, 2**14), (2**26, 1, 2**14)),
    ],
    ids=["m", "k", "tiles"],
)
def test_triton_refuses_products_that_32_bits_cannot_count(
    too_large: tuple[int, int, int], fits: tuple[int, int, int], interpreted_triton: None
) -> None:
    _C.set_gemm_mode("kernel")
    one = torch.ones(1, dtype=torch.float16)
    for (m, k, n), is_triton in ((too_large, False), (fits, True)):
        backend, _ = _C.Product(one.expand(m, k), one.expand(k, n)).choose()
        assert (backend == "triton") is is_triton


def backward_in_a_thread(result: torch.Tensor) -> BaseException | None:
    """Run a backward pass in a thread of its own, as autograd does for a GPU; return its error."""
    with ThreadPoolExecutor() as pool:
        return pool.submit(result.sum().backward).exception()


def test_a_backward_pass_is_tritons_too(
    interpreted_triton: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Triton backward pass runs on Triton, also in another thread than the forward pass."""
    from amp_ext.triton_kernels.gemm.gemm import gemm

    calls = []

    def counting(*arguments: object) -> object:
        calls.append((threading.current_thread() is threading.main_thread(), arguments[2]))
        return gemm(*arguments)

    monkeypatch.setattr(TRITON["gemm"], counting)
    a = torch.ones(2, 3, dtype=torch.float16, requires_grad=True)
    b = torch.ones(3, 4, dtype=torch.float16, requires_grad=True)
    assert backward_in_a_thread(amp_ext.ops.gemm(a, b)) is None
    assert calls[0] == (True, (1, 1, 2, 4, 3))
    assert sorted(calls[1:]) == [(False, (1, 1, 2, 3, 4)), (False, (1, 1, 3, 4, 2))]
    assert a.grad.tolist() == [[4.0] * 3] * 2
    assert b.grad.tolist() == [[2.0] * 4] * 3


@pytest.mark.parametrize("op", ["check_finite", "gemm"])
def test_errors_of_a_kernel_reach_the_caller(
    op: str, interpreted_triton: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors of a kernel keep their type through the dispatcher, and through autograd."""

    def failing(*arguments: object) -> None:
        raise MemoryError("the kernel's own words")

    half = torch.ones(4, 4, dtype=torch.float16, requires_grad=op == "gemm")
    result = amp_ext.ops.gemm(half, half)
    monkeypatch.setattr(TRITON[op], failing)
    if op == "gemm":
        error = backward_in_a_thread(result)
        assert isinstance(error, MemoryError) and str(error) == "the kernel's own words"
    else:
        with pytest.raises(MemoryError, match="the kernel's own words"):
            amp_ext.ops.check_finite([half], torch.zeros(()))
