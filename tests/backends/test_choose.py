"""Test the choice of a call's backend: once, before any operand is copied."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import programs
from amp_ext import _C, ops
from cases import multiplies
from executors import CPU, CUDA
from fake_cuda.recorder import cost

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def of(
    a: torch.dtype, b: torch.dtype, m: int = 4, k: int = 8, n: int = 8, device: torch.device = CPU
) -> str:
    operands = (torch.zeros(m, k, dtype=a), torch.zeros(k, n, dtype=b))
    return _C.Product(*(operand.to(device) for operand in operands)).choose()[0]


def test_products_of_a_cpu() -> None:
    assert of(FP16, FP16) == of(FP16, FP32) == of(FP32, FP32) == of(BF16, BF16) == "cpu"
    assert of(FP64, FP64) == of(FP16, FP64) == "library"
    assert _C.Product(*[torch.zeros(4, 4, dtype=FP64)] * 2).choose()[1] == "FP64 operands"


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_products_by_the_processors_instructions(dtype: torch.dtype) -> None:
    """torch multiplies by the processor's instructions. A NaN behind a row does not spread."""
    large = "library" if multiplies(dtype) else "cpu"
    assert of(dtype, dtype, 256, 256, 256) == of(dtype, dtype, 256, 257, 256) == large
    assert of(dtype, dtype, 4, 512, 512) == of(dtype, dtype, 32, 64, 32) == "cpu"
    assert of(BF16, FP16, 256, 256, 256) == "cpu"
    wide, b = torch.ones(8, 512, 66, dtype=dtype), torch.ones(8, 33, 1024, dtype=dtype)
    wide[:, 1] = torch.inf
    assert ops.gemm(wide[0, :, ::2], b[0])[0].isfinite().all()
    assert ops.gemm(wide[..., :33].contiguous(), b)[:, 0].isfinite().all()


def test_fewer_instructions_are_asked_for() -> None:
    """ATEN_CPU_CAPABILITY also turns off the instructions for 16-bit products."""
    code = "import torch; from amp_ext import _C; a = torch.ones(256, 256); "
    code += "print([_C.Product(x, x).choose()[0] for x in (a.half(), a.bfloat16())])"
    assert programs.output(code, ATEN_CPU_CAPABILITY="avx2") == "['cpu', 'cpu']\n"


@pytest.mark.fake_cuda
def test_kernels_have_to_be_asked_for() -> None:
    a = torch.zeros(16, 16, dtype=FP16, device=CUDA)
    for mode in ("kernel", "auto", "library"):
        _C.set_gemm_mode(mode)
        assert of(FP16, FP16, device=CUDA) == ("cuda" if mode == "kernel" else "library")
        assert cost(ops.gemm, a, a).launches == (mode == "kernel")


@pytest.mark.fake_cuda
def test_what_the_kernels_cannot_compute_is_the_librarys() -> None:
    half = torch.zeros(8, 8, dtype=FP16, device=CUDA)
    assert _C.Product(half, half).choose() == ("cuda", "AMP_EXT_GEMM is kernel")
    assert of(BF16, BF16, device=CUDA) == "cuda"
    for pair in ((FP16, BF16), (FP32, FP32), (FP64, FP64)):
        assert of(*pair, device=CUDA) == "library"
    strided = torch.zeros(9, 9, 9, dtype=FP16, device=CUDA)[:, :, 0]
    assert _C.Product(strided, strided).choose()[0] == "library"


@pytest.mark.fake_cuda
@pytest.mark.parametrize(
    ("capability", "aligned", "other"),
    [
        ("75", "library", "library"),  # no product of ours, as no cp.async and no BF16
        ("80", "cuda", "cuda"),
        ("90", "cuda", "library"),
        ("103", "library", "library"),  # nor without tcgen05
        ("110", "library", "library"),
        ("120", "cuda", "cuda"),
    ],
)
def test_products_by_compute_capability_cuda(capability: str, aligned: str, other: str) -> None:
    """List ops run on the kernels for every compute capability, products on those with kernels."""
    code = """
import torch, amp_ext
from amp_ext import verify

a = torch.zeros(16, 17, device="cuda").half()
print(*(amp_ext._C.Product(b, b).choose()[0] for b in (a[:, :16].contiguous(), a[:, :16])))
print("gemm_f16" in verify.families("cuda", a.device))
grad, one = torch.full((9,), 4.0, device="cuda"), torch.ones((), device="cuda")
amp_ext.ops.unscale_([grad], one * 0, one / 4)
print(amp_ext._C.choose("amp_ext", "cuda"), grad.sum().item())
"""
    said = programs.output(code, FAKE_CUDA_CAPABILITY=capability)
    assert said.split() == [aligned, other, str(aligned == "cuda"), "cuda", "9.0"]


@pytest.mark.fake_cuda
def test_batches_and_sums_of_them_are_different_products() -> None:
    """Batches and sums of batches are different products: kernels count steps in 32 bits."""
    zeros = torch.zeros(64, 64, dtype=FP16, device=CUDA)
    a, b = zeros[:8].expand(2**30, 8, 64), zeros[:, :8].expand(2**30, 64, 8)
    assert _C.Product(a, b).choose()[0] == "cuda"
    assert _C.Product(a, b, sum_batch=True).choose()[0] == "library"


def test_batches_are_one_product_where_they_can_be() -> None:
    a, b, bias = (torch.ones(shape, dtype=FP64) for shape in ((2, 3, 4, 8), (8, 5), 5))
    terms = torch.ones(3, 8, 4, dtype=FP64)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        ops.gemm(a, b)
        ops.gemm(a, b, bias=bias)
        ops.gemm(terms, terms, trans_a=True, sum_batch=True)
    operands = {"aten::mm": slice(0, 2), "aten::addmm": slice(1, 3)}
    events = [event for event in profiler.events() if event.name in operands]
    shapes = [event.input_shapes[operands[event.name]] for event in events]
    assert shapes == [[[24, 8], [8, 5]], [[24, 8], [8, 5]], [[4, 24], [24, 4]]]
