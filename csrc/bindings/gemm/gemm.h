// Declares the ops of matrix products for C++ callers, and the helpers of their implementations.
// amp_ext.ops documents each op.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>

#include <optional>

#include "amp_ext/gemm.h"

namespace amp_ext {

constexpr auto kGemm = "amp_ext::gemm";
constexpr auto kGemmAccumulate = "amp_ext::gemm_accumulate_";

// The arguments beside a and b.
struct GemmOptions {
  bool trans_a = false;
  bool trans_b = false;
  bool sum_batch = false;
  std::optional<at::Tensor> c = std::nullopt;
  double alpha = 1;
  double beta = 1;
  std::optional<at::Tensor> bias = std::nullopt;
  std::optional<at::ScalarType> out_dtype = std::nullopt;
};

// Calls the op through the dispatcher.
at::Tensor gemm(const at::Tensor& a, const at::Tensor& b, const GemmOptions& options);

// A function of options in the signature of gemm.
template <auto kFunction>
at::Tensor gemm_op(const at::Tensor& a, const at::Tensor& b, bool trans_a, bool trans_b,
                   bool sum_batch, const std::optional<at::Tensor>& c, double alpha, double beta,
                   const std::optional<at::Tensor>& bias, std::optional<at::ScalarType> out_dtype) {
  return kFunction(a, b, GemmOptions{trans_a, trans_b, sum_batch, c, alpha, beta, bias, out_dtype});
}

inline at::ScalarType out_dtype_of(const at::Tensor& a, const at::Tensor& b,
                                   const std::optional<at::ScalarType>& out_dtype) {
  return out_dtype.value_or(c10::promoteTypes(a.scalar_type(), b.scalar_type()));
}

// Returns the type of sums that end up in `type`.
inline at::ScalarType wide(at::ScalarType type) {
  return type == at::kDouble ? at::kDouble : at::kFloat;
}

// Returns the accumulator's type of products of a and b.
inline at::ScalarType sums_dtype_of(const at::Tensor& a, const at::Tensor& b) {
  return wide(c10::promoteTypes(a.scalar_type(), b.scalar_type()));
}

// Check every argument except memory, and return the shape of the result.
c10::SymDimVector check_gemm(const char* op, const at::Tensor& a, const at::Tensor& b,
                             const GemmOptions& options);
void check_gemm_accumulate(const at::Tensor& c, const at::Tensor& a, const at::Tensor& b,
                           const GemmOptions& options);

// The tensors that a product reads, as GemmArgs describes them; undefined where there is none.
struct GemmTensors {
  at::Tensor a, b, c, bias;
};

// Computes a product by torch's own library. The result has two dimensions, or three with a batch.
// If the product is added to out, it is in the memory of c. No pointer in `args` is followed.
at::Tensor library_gemm(const GemmArgs& args, const GemmTensors& tensors);

}  // namespace amp_ext
