"""Triton kernels, one for each CUDA kernel; installed as amp_ext.triton_kernels."""

from amp_ext.triton_kernels.foreach import PROGRAMS
from amp_ext.triton_kernels.unscale import unscale_
