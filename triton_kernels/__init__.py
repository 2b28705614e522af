"""Triton kernels, one for each CUDA kernel; installed as amp_ext.triton_kernels."""
