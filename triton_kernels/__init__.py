"""Triton kernels, one for each CUDA kernel; installed as amp_ext.triton_kernels."""

from amp_ext.triton_kernels.gemm.gemm import gemm
from amp_ext.triton_kernels.lists.cast import cast_
from amp_ext.triton_kernels.lists.check_finite import check_finite
from amp_ext.triton_kernels.lists.foreach import PROGRAMS
from amp_ext.triton_kernels.lists.grad_norm import grad_norm
from amp_ext.triton_kernels.lists.unscale import unscale_
from amp_ext.triton_kernels.lists.update_scale import update_scale_

__all__ = ["PROGRAMS", "cast_", "check_finite", "gemm", "grad_norm", "unscale_", "update_scale_"]
