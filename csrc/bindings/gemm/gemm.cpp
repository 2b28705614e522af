// Defines the ops of matrix products.
#include "gemm/gemm.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "checks/tensors.h"
#include "gemm/product.h"
#include "op.h"

namespace amp_ext {
namespace {

at::Tensor gemm_kernel(const at::Tensor& a, const at::Tensor& b, const GemmOptions& options) {
  Product product(kGemm, a, b, options, check_gemm(kGemm, a, b, options));
  return product.compute(product.choose());
}

// Returns whether kernels can write a tensor: rows one after another, and matrices too.
bool is_row_major(const at::Tensor& tensor) {
  int64_t extent = 1;
  for (int64_t d = tensor.dim() - 1; d >= 0; --d) {
    if (tensor.size(d) == 1) continue;
    const bool last = d == tensor.dim() - 1;
    if (last ? tensor.stride(d) != 1 : tensor.stride(d) < extent) return false;
    extent = tensor.stride(d) * tensor.size(d);
  }
  return batch_stride(tensor).has_value();
}

template <bool kFake>
void gemm_accumulate_op(at::Tensor& c, const at::Tensor& given_a, const at::Tensor& given_b,
                        bool trans_a, bool trans_b, bool sum_batch, double alpha) {
  const GemmOptions options{
      .trans_a = trans_a, .trans_b = trans_b, .sum_batch = sum_batch, .alpha = alpha};
  check_gemm_accumulate(c, given_a, given_b, options);
  if (kFake) return;
  const at::Tensor a = given_a.resolve_neg(), b = given_b.resolve_neg();
  TORCH_CHECK(c.numel() == 0 || is_row_major(c), kGemmAccumulate,
              ": c must be row-major with a column stride of 1, its leading dimensions one after "
              "another, got strides ",
              c.strides());
  Arguments given(kGemmAccumulate, c.device());
  given.write_tensor("c", c);
  given.read_tensor("a", a);
  given.read_tensor("b", b);
  given.check_apart();
  Product product(kGemmAccumulate, a, b, options, c.sym_sizes(), &c);
  product.compute(product.choose());
  given.mark_written();
}

at::Tensor gemm_fake(const at::Tensor& a, const at::Tensor& b, const GemmOptions& options) {
  const auto sizes = check_gemm(kGemm, a, b, options);
  return at::empty_symint(sizes, a.options().dtype(out_dtype_of(a, b, options.out_dtype)));
}

}  // namespace

at::Tensor gemm(const at::Tensor& a, const at::Tensor& b, const GemmOptions& o) {
  using Signature = decltype(gemm_op<gemm_kernel>);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(kGemm, "").typed<Signature>();
  return op.call(a, b, o.trans_a, o.trans_b, o.sum_batch, o.c, o.alpha, o.beta, o.bias,
                 o.out_dtype);
}

TORCH_LIBRARY_FRAGMENT(amp_ext, m) {
  implement(m, "gemm", TORCH_FN(gemm_op<gemm_kernel>), TORCH_FN(gemm_op<gemm_fake>));
  implement(m, "gemm_accumulate_", TORCH_FN(gemm_accumulate_op<false>),
            TORCH_FN(gemm_accumulate_op<true>));
}

}  // namespace amp_ext
