// The gemm op for C++ callers, and what its implementations share.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>
#include <string_view>

#include "amp_ext/launch.h"

namespace amp_ext {

// Arguments of the op beside a and b; see amp_ext.ops.gemm.
struct GemmOptions {
  bool trans_a = false;
  bool trans_b = false;
  bool sum_batch = false;
  std::optional<at::Tensor> c = std::nullopt;
  double alpha = 1;
  double beta = 1;
  std::optional<at::Tensor> bias = std::nullopt;
  std::string_view activation = "none";
  std::optional<at::ScalarType> out_dtype = std::nullopt;
};

// torch.ops.amp_ext.gemm, through the dispatcher.
at::Tensor gemm(const at::Tensor& a, const at::Tensor& b, const GemmOptions& options);

// The checks of one argument of `op`.
void check_operand(const char* op, const char* name, const at::Tensor& tensor, at::Device device);
Activation activation_of(const char* op, std::string_view name);

inline at::ScalarType out_dtype_of(const at::Tensor& a, const at::Tensor& b,
                                   const std::optional<at::ScalarType>& out_dtype) {
  return out_dtype.value_or(a.scalar_type() == b.scalar_type()
                                ? a.scalar_type()
                                : c10::promoteTypes(a.scalar_type(), b.scalar_type()));
}

// Checks every argument and returns the shape of the result. Int is int64_t, or c10::SymInt for
// tensors without data.
template <class Int>
c10::SmallVector<Int, 5> check_gemm(const at::Tensor& a, const at::Tensor& b,
                                    const GemmOptions& options);

// The product by torch's own library, for devices and types that have no kernel here. Arguments
// have been checked.
at::Tensor torch_gemm(const at::Tensor& a, const at::Tensor& b, const GemmOptions& options);

}  // namespace amp_ext
