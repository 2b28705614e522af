// Checks the arguments of the ops of matrix products.
#include <ATen/ExpandUtils.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <cmath>
#include <limits>

#include "checks/tensors.h"
#include "gemm/gemm.h"

namespace amp_ext {
namespace {

// Throws unless the factor is a number of the accumulator's type.
void check_factor(const char* op, const char* name, double factor, at::ScalarType sums) {
  const bool fits =
      sums == at::kDouble || !std::isfinite(factor) || std::isfinite(static_cast<float>(factor));
  TORCH_CHECK(fits, op, ": ", name, " must be at most ", std::numeric_limits<float>::max(),
              " in magnitude, since the product is summed in float32, got ", factor);
}

}  // namespace

c10::SymDimVector check_gemm(const char* op, const at::Tensor& a, const at::Tensor& b,
                             const GemmOptions& options) {
  const at::Device device = a.device();
  checked_dtype(op, "a", a, device);
  checked_dtype(op, "b", b, device);
  const at::ScalarType out_dtype = out_dtype_of(a, b, options.out_dtype);
  TORCH_CHECK_NOT_IMPLEMENTED(dtype_of(out_dtype), op, ": out_dtype must be float16, bfloat16, ",
                              "float32 or float64, got ", out_dtype);
  check_factor(op, "alpha", options.alpha, sums_dtype_of(a, b));
  check_factor(op, "beta", options.beta, sums_dtype_of(a, b));

  const c10::SymIntArrayRef as = a.sym_sizes(), bs = b.sym_sizes();
  TORCH_CHECK(as.size() >= 2, op, ": a must have at least 2 dimensions, got shape ", as);
  TORCH_CHECK(bs.size() >= 2, op, ": b must have at least 2 dimensions, got shape ", bs);
  const c10::SymInt& m = as[as.size() - (options.trans_a ? 1 : 2)];
  const c10::SymInt& k = as[as.size() - (options.trans_a ? 2 : 1)];
  const c10::SymInt& b_rows = bs[bs.size() - (options.trans_b ? 1 : 2)];
  const c10::SymInt& n = bs[bs.size() - (options.trans_b ? 2 : 1)];
  TORCH_CHECK(k == b_rows, op, ": a of shape ", as, options.trans_a ? " (transposed)" : "",
              " needs a b of ", k, options.trans_b ? " columns" : " rows", ", got shape ", bs);
  const bool a_shared = as.size() == 2, b_shared = bs.size() == 2;
  const auto a_batch = as.slice(0, as.size() - 2), b_batch = bs.slice(0, bs.size() - 2);
  TORCH_CHECK(a_shared || b_shared || a_batch.equals(b_batch), op,
              ": leading dimensions of a and b must be equal, or absent in one, got shapes ", as,
              " and ", bs);

  const auto batch = a_shared ? b_batch : a_batch;
  TORCH_CHECK(!options.sum_batch || (!a_shared && !b_shared), op,
              ": sum_batch needs leading dimensions in a and b, got shapes ", as, " and ", bs);
  c10::SymDimVector out;
  if (!options.sum_batch) out.append(batch.begin(), batch.end());
  out.push_back(m);
  out.push_back(n);
  if (options.bias) {
    checked_dtype(op, "bias", *options.bias, device);
    const auto sizes = options.bias->sym_sizes();
    TORCH_CHECK(sizes.size() == 1 && sizes[0] == n, op, ": bias must have shape [", n,
                "], got shape ", sizes);
  }
  if (options.c) {
    checked_dtype(op, "c", *options.c, device);
    TORCH_CHECK(at::is_expandable_to(options.c->sym_sizes(), out), op,
                ": c must be expandable to the result's shape ", c10::SymIntArrayRef(out),
                ", got shape ", options.c->sym_sizes());
  }
  return out;
}

void check_gemm_accumulate(const at::Tensor& c, const at::Tensor& a, const at::Tensor& b,
                           const GemmOptions& options) {
  const auto sizes = check_gemm(kGemmAccumulate, a, b, options);
  checked_dtype(kGemmAccumulate, "c", c, a.device());
  check_not_negated(kGemmAccumulate, "c", c);
  using torch::autograd::isFwGradDefined;
  TORCH_CHECK_NOT_IMPLEMENTED(!isFwGradDefined(c) && !isFwGradDefined(a) && !isFwGradDefined(b),
                              kGemmAccumulate, ": forward-mode differentiation is not implemented");
  const bool records_gradients = at::GradMode::is_enabled();
  check_no_history(kGemmAccumulate, "c", c, records_gradients);
  check_no_history(kGemmAccumulate, "a", a, records_gradients);
  check_no_history(kGemmAccumulate, "b", b, records_gradients);
  TORCH_CHECK(c.scalar_type() == at::kFloat, kGemmAccumulate, ": c must be a float tensor, got ",
              c.scalar_type());
  TORCH_CHECK(c.sym_sizes().equals(sizes), kGemmAccumulate,
              ": c must have the shape of the result, ", c10::SymIntArrayRef(sizes), ", got shape ",
              c.sym_sizes());
}

}  // namespace amp_ext
