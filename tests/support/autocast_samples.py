"""Small arguments for every op that torch registers for autocast, by the op's name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, rand, randn

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def call(*args: Any, **kwargs: Any) -> Arguments:
    """Hold the arguments of a call."""
    return args, kwargs


def definite() -> Tensor:
    """Return a symmetric positive definite matrix."""
    factor = randn(4, 4)
    return factor @ factor.t() + 4 * torch.eye(4)


def signs(*shape: int) -> Tensor:
    """Return numbers of -1 and 1."""
    return torch.randint(0, 2, shape) * 2.0 - 1


def classes(*shape: int) -> Tensor:
    """Return classes of 0, 1 and 2."""
    return torch.randint(0, 3, shape)


def grid(dims: int) -> Arguments:
    """Return an image and the sampling places of grid_sampler."""
    return call(randn(1, 2, *dims * [4]), 2 * rand(1, *dims * [3], dims) - 1, 0, 0, False)


def image(dims: int, *rest: Any) -> Arguments:
    """Return an image of edge 6 and the further arguments."""
    return call(randn(1, 2, *dims * [6]), *rest)


def convolution(dims: int, *rest: Any) -> Arguments:
    """Return an image, a 3x3 kernel and a bias."""
    return image(dims, randn(2, 2, *dims * [3]), randn(2), *rest)


def unpool(dims: int, *rest: Any) -> Arguments:
    """Return two values and their places."""
    return call(randn(1, 1, *dims * [1]), torch.zeros(1, 1, *dims * [1]).long(), dims * [2], *rest)


def ctc(*lengths: Any) -> Arguments:
    """Return log-probabilities of 5 steps, and a target of 2."""
    return call(randn(5, 1, 3).log_softmax(-1), torch.tensor([[1, 2]]), *lengths)


def lstm() -> Arguments:
    """Return one LSTM layer: 3 steps of 2 inputs, 4 hidden values."""
    weights = (randn(16, 2), randn(16, 4), randn(16), randn(16), randn(1, 1, 4), randn(1, 1, 4))
    return call(
        randn(3, 1, 2), *weights, False, [], 2, 4, 1, True, False, False, torch.is_grad_enabled()
    )


def attention() -> Arguments:
    """Return self-attention over 3 positions, width 4, 2 heads."""
    value = randn(2, 3, 4)
    weights = randn(12, 4), randn(12), randn(4, 4), randn(4)
    return call(value, value, value, 4, 2, *weights, need_weights=False)


def factors() -> Arguments:
    """Return a right side and an LU factorisation."""
    return call(randn(4, 2), *torch.linalg.lu_factor(definite()))


def named(*shape: int) -> Tensor:
    """Return a random matrix with names."""
    return randn(shape, names=("n", "c"))


def single(shape: tuple[int, ...], *rest: Any) -> Callable[[], Arguments]:
    """Return one random tensor and the further arguments."""
    return lambda: call(randn(shape), *rest)


def pair(*shapes: tuple[int, ...]) -> Callable[[], Arguments]:
    """Return random tensors of these shapes."""
    return lambda: call(*map(randn, shapes))


def matrix() -> Arguments:
    return call(definite())


SAMPLES: dict[str, Callable[[], Arguments]] = {
    "_addmm_activation": pair((5,), (3, 4), (4, 5)),
    "_convolution.deprecated": lambda: convolution(
        2, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, True
    ),
    "_grid_sampler_2d_cpu_fallback": lambda: grid(2),
    "_lu_with_info": matrix,
    "_native_multi_head_attention": attention,
    "adaptive_avg_pool3d": lambda: image(3, [2, 2, 2]),
    "adaptive_max_pool3d": lambda: image(3, [2, 2, 2]),
    "addbmm": pair((3, 5), (2, 3, 4), (2, 4, 5)),
    "addmm": pair((3, 5), (3, 4), (4, 5)),
    "avg_pool3d": lambda: image(3, [2, 2, 2]),
    "baddbmm": pair((2, 3, 5), (2, 3, 4), (2, 4, 5)),
    "binary_cross_entropy": lambda: call(rand(3), rand(3)),
    "binary_cross_entropy_with_logits": lambda: call(randn(3), rand(3)),
    "bmm": pair((2, 3, 4), (2, 4, 5)),
    "cat": lambda: call([randn(2, 3), randn(2, 3)]),
    "cdist": pair((3, 4), (5, 4)),
    "cholesky": matrix,
    "cholesky_inverse": matrix,
    "cholesky_solve": lambda: call(randn(4, 2), definite()),
    "conv1d": lambda: convolution(1),
    "conv1d.padding": lambda: convolution(1, [1], "same"),
    "conv2d": lambda: convolution(2),
    "conv2d.padding": lambda: convolution(2, [1, 1], "same"),
    "conv3d": lambda: convolution(3),
    "conv3d.padding": lambda: convolution(3, [1, 1, 1], "same"),
    "conv_tbc": pair((5, 1, 2), (3, 2, 4), (4,)),
    "conv_transpose1d": lambda: convolution(1),
    "conv_transpose2d.input": lambda: convolution(2),
    "conv_transpose3d.input": lambda: convolution(3),
    "cosine_embedding_loss": lambda: call(randn(3, 4), randn(3, 4), signs(3)),
    "cross_entropy_loss": lambda: call(randn(4, 3), classes(4)),
    "ctc_loss.IntList": lambda: ctc([5], [2]),
    "ctc_loss.Tensor": lambda: ctc(torch.tensor([5]), torch.tensor([2])),
    "fake_quantize_per_tensor_affine": single((3, 4), 0.1, 0, 0, 255),
    "fft_fft": single((8,)),
    "fft_fft2": single((4, 4)),
    "fft_fftn": single((4, 4)),
    "fft_hfft": single((8,)),
    "fft_ifft": single((8,)),
    "fft_ifft2": single((4, 4)),
    "fft_ifftn": single((4, 4)),
    "fft_ihfft": single((8,)),
    "fft_irfft": single((8,)),
    "fft_irfft2": single((4, 4)),
    "fft_irfftn": single((4, 4)),
    "fft_rfft": single((8,)),
    "fft_rfft2": single((4, 4)),
    "fft_rfftn": single((4, 4)),
    "fractional_max_pool2d": lambda: image(2, [2, 2], [2, 2], rand(1, 2, 2)),
    "fractional_max_pool3d": lambda: image(3, [2, 2, 2], [2, 2, 2], rand(1, 2, 3)),
    "geqrf": single((4, 3)),
    "grid_sampler": lambda: grid(2),
    "grid_sampler_2d": lambda: grid(2),
    "grid_sampler_3d": lambda: grid(3),
    "hinge_embedding_loss": lambda: call(randn(3), signs(3)),
    "huber_loss": pair((3,), (3,)),
    "index_copy": lambda: call(randn(3, 4), 0, torch.tensor([2, 0]), randn(2, 4)),
    "index_copy.dimname": lambda: call(named(3, 4), "n", torch.tensor([2, 0]), named(2, 4)),
    "inverse": matrix,
    "kl_div": lambda: call(randn(3, 4).log_softmax(-1), rand(3, 4)),
    "l1_loss": pair((3,), (3,)),
    "linalg_cholesky": matrix,
    "linalg_cholesky_ex": matrix,
    "linalg_cond": matrix,
    "linalg_cond.p_str": lambda: call(definite(), "fro"),
    "linalg_eig": matrix,
    "linalg_eigh": matrix,
    "linalg_eigvals": matrix,
    "linalg_eigvalsh": matrix,
    "linalg_householder_product": lambda: call(randn(4, 3), rand(3)),
    "linalg_inv": matrix,
    "linalg_inv_ex": matrix,
    "linalg_lstsq": pair((4, 3), (4, 2)),
    "linalg_matrix_rank": lambda: call(definite(), 1e-3),
    "linalg_matrix_rank.atol_rtol_float": lambda: call(definite(), atol=1e-3, rtol=1e-3),
    "linalg_matrix_rank.atol_rtol_tensor": lambda: call(definite(), atol=torch.tensor(1e-3)),
    "linalg_matrix_rank.tol_tensor": lambda: call(definite(), torch.tensor(1e-3)),
    "linalg_matrix_sqrth": matrix,
    "linalg_qr": single((4, 3)),
    "linalg_solve": lambda: call(definite(), randn(4, 2)),
    "linalg_svd": matrix,
    "linalg_svdvals": matrix,
    "linalg_tensorinv": lambda: call(definite().view(2, 2, 4), 2),
    "linalg_tensorsolve": lambda: call(definite().view(2, 2, 4), randn(2, 2)),
    "linalg_vecdot": pair((3, 4), (3, 4)),
    "linear": pair((3, 4), (5, 4), (5,)),
    "lu_solve": factors,
    "margin_ranking_loss": lambda: call(randn(3), randn(3), signs(3)),
    "matmul": pair((2, 3, 4), (4, 5)),
    "max_pool3d": lambda: image(3, [2, 2, 2]),
    "max_unpool2d": lambda: unpool(2),
    "max_unpool3d": lambda: unpool(3, [2, 2, 2], [0, 0, 0]),
    "mkldnn_rnn_layer": lstm,
    "mm": pair((3, 4), (4, 5)),
    "mse_loss": pair((3,), (3,)),
    "multi_margin_loss": lambda: call(randn(4, 3), classes(4)),
    "multilabel_margin_loss": lambda: call(randn(4, 3), classes(4, 3)),
    "multilabel_margin_loss_forward": lambda: call(randn(4, 3), classes(4, 3), 1),
    "nanquantile": lambda: call(randn(5), torch.tensor(0.3)),
    "nanquantile.scalar": single((5,), 0.3),
    "nll_loss": lambda: call(randn(4, 3), classes(4)),
    "nll_loss2d": lambda: call(randn(1, 3, 2, 2), classes(1, 2, 2)),
    "orgqr": lambda: call(randn(4, 3), rand(3)),
    "ormqr": lambda: call(randn(4, 3), rand(3), randn(4, 2)),
    "pinverse": single((4, 3)),
    "poisson_nll_loss": lambda: call(randn(3), rand(3), True, False, 1e-8, 1),
    "polar": pair((3,), (3,)),
    "prelu": pair((2, 3), (3,)),
    "prod": single((5,)),
    "prod.dim_Dimname": lambda: call(named(3, 4), "c"),
    "prod.dim_int": single((3, 4), 1),
    "qr": single((4, 3)),
    "quantile": lambda: call(randn(5), torch.tensor(0.3)),
    "quantile.scalar": single((5,), 0.3),
    "reflection_pad1d": lambda: image(1, [1, 1]),
    "reflection_pad2d": lambda: image(2, 4 * [1]),
    "replication_pad1d": lambda: image(1, [1, 1]),
    "replication_pad2d": lambda: image(2, 4 * [1]),
    "replication_pad3d": lambda: image(3, 6 * [1]),
    "scaled_dot_product_attention": pair(*3 * [(1, 2, 3, 4)]),
    "smooth_l1_loss": pair((3,), (3,)),
    "soft_margin_loss": lambda: call(randn(3), signs(3)),
    "stack": lambda: call([randn(2, 3), randn(2, 3)]),
    "stft": lambda: call(randn(16), 4, return_complex=True),
    "stft.center": lambda: call(randn(16), 4, return_complex=True, center=False),
    "svd": matrix,
    "trace": matrix,
    "triangular_solve": lambda: call(randn(4, 2), definite()),
    "triplet_margin_loss": pair((3, 4), (3, 4), (3, 4)),
    "view_as_complex": single((3, 2)),
}
"""Without their "aten::"; the values are fp32."""

NEWEST_TORCH = (2, 14)
"""The newest version whose ops all have a sample."""


def check_samples(names: Iterable[str], version: str) -> None:
    """Fail for ops without a sample; only warn on a torch newer than any known here."""
    missing = ", ".join(sorted(set(names) - set(SAMPLES)))
    if missing:
        message = f"torch {version} has ops under autocast without a sample, not tested: {missing}"
        assert tuple(map(int, version.split(".")[:2])) > NEWEST_TORCH, message
        warnings.warn(message, RuntimeWarning, stacklevel=2)
