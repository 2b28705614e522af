// The Triton backend: amp_ext.triton_kernels behind the same checks as the other backends.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "backend.h"
#include "gemm.h"

namespace amp_ext {

// Whether Triton kernels serve the tensors of a type of device. On the CPU they have to be
// interpreted. Policy is Python's, in amp_ext/backend.py.
void use_triton(c10::DeviceType type, bool on);
bool uses_triton(c10::Device device);

const Backend& triton_backend();

// Whether they form a product.
bool triton_serves(const at::Tensor& a, const at::Tensor& b, const GemmOptions& options);

// The ops, for arguments that have been checked and are served; `sizes` are those of the result.
at::Tensor triton_gemm(const at::Tensor& a, const at::Tensor& b, const GemmOptions& options,
                       at::IntArrayRef sizes);
TensorPair triton_gemm_with_aux(const at::Tensor& a, const at::Tensor& b,
                                const GemmOptions& options, at::IntArrayRef sizes);
TensorPair triton_gemm_times_derivative(const at::Tensor& a, const at::Tensor& b,
                                        const at::Tensor& aux, const GemmOptions& options,
                                        at::IntArrayRef sizes);
void triton_gemm_accumulate_(const at::Tensor& c, const at::Tensor& a, const at::Tensor& b,
                             const GemmOptions& options);

}  // namespace amp_ext
