"""Triton kernels, one for each CUDA kernel; installed as amp_ext.triton_kernels."""

from amp_ext.triton_kernels.cast import cast_
from amp_ext.triton_kernels.check_finite import check_finite
from amp_ext.triton_kernels.foreach import PROGRAMS
from amp_ext.triton_kernels.gemm import gemm
from amp_ext.triton_kernels.grad_norm import grad_norm
from amp_ext.triton_kernels.unscale import unscale_
from amp_ext.triton_kernels.update_scale import update_scale_

__all__ = ["PROGRAMS", "cast_", "check_finite", "gemm", "grad_norm", "unscale_", "update_scale_"]
