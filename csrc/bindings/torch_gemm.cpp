// Matrix products by torch's own library.
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/threshold_backward.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "gemm.h"

namespace amp_ext {
namespace {

// Of two matrices or two batches of them.
at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  return a.dim() == 2 ? at::mm(a, b) : at::bmm(a, b);
}

at::Tensor fp32_product(const at::Tensor& a, const at::Tensor& b) {
  const bool low = a.scalar_type() == b.scalar_type() &&
                   (a.scalar_type() == at::kHalf || a.scalar_type() == at::kBFloat16);
  if (!low || a.is_cpu()) {
    const at::ScalarType type = sums_dtype_of(a, b);
    return product(a.to(type), b.to(type));
  }
  return a.dim() == 2 ? at::mm(a, b, at::kFloat) : at::bmm(a, b, at::kFloat);
}

// The product in the operands' own type, with at most one addend of that type.
at::Tensor low_product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c, double alpha,
                       double beta) {
  if (!c.defined()) return product(a, b);
  return a.dim() == 2 ? at::addmm(c, a, b, beta, alpha) : at::baddbmm(c, a, b, beta, alpha);
}

// torch's word for which of the two it is.
c10::string_view approximation(Activation activation) {
  return activation == Activation::gelu_tanh ? "tanh" : "none";
}

void activate_(at::Tensor& x, Activation activation) {
  if (activation == Activation::none) return;
  if (activation == Activation::relu) {
    x.relu_();
  } else {
    at::gelu_(x, approximation(activation));
  }
}

// Whether an activation may be of a sum that is already rounded to the result's type: on a CPU the
// library is chosen for products of fp64, and of bf16 into bf16, which it does not give in fp32.
bool rounds_before_activation(const at::Tensor& a) { return a.is_cpu(); }

// x before its activation.
at::Tensor sum(const at::Tensor& a, const at::Tensor& b, const GemmOptions& options) {
  GemmOptions plain = options;
  const at::ScalarType type = sums_dtype_of(a, b);
  plain.activation = "none";
  plain.out_dtype = rounds_before_activation(a) && type != at::kDouble
                        ? out_dtype_of(a, b, options.out_dtype)
                        : type;
  return torch_gemm(a, b, plain);
}

}  // namespace

at::Tensor activation_gradient(const at::Tensor& grad, const at::Tensor& x, Activation activation) {
  if (activation == Activation::none) return grad;
  if (activation == Activation::relu) return at::threshold_backward(grad, x, 0);
  // Beyond, derivatives are 0 or 1, as they are at infinities, of which torch makes NaNs.
  return at::gelu_backward(grad, at::clamp(x, -1e3, 1e3), approximation(activation));
}

at::Tensor torch_gemm(const at::Tensor& a, const at::Tensor& b, const GemmOptions& o) {
  // An active autocast would cast again.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  at::Tensor left = o.trans_a ? a.mT() : a, right = o.trans_b ? b.mT() : b;
  const at::ScalarType out_dtype = out_dtype_of(a, b, o.out_dtype);
  const bool read_c = o.c && o.beta != 0;

  const auto batch = left.dim() > 2 ? left.sizes() : right.sizes();
  std::vector<int64_t> sizes(batch.begin(), batch.end() - 2);
  if (o.sum_batch) {
    left = left.movedim(-2, 0).flatten(1);
    right = right.flatten(0, -2);
    sizes.clear();
  }
  const bool rows_join = !o.sum_batch && right.dim() == 2 && !read_c;
  sizes.push_back(left.size(-2));
  sizes.push_back(right.size(-1));
  if (rows_join) {
    if (left.dim() > 2) left = left.flatten(0, -2);
  } else if (sizes.size() > 2) {
    const auto as_batch = [&](const at::Tensor& x) {
      std::vector<int64_t> whole(sizes.begin(), sizes.end() - 2);
      whole.push_back(x.size(-2));
      whole.push_back(x.size(-1));
      return x.expand(whole).flatten(0, -3);
    };
    left = as_batch(left);
    right = as_batch(right);
  }
  at::Tensor c;
  if (read_c) {
    c = o.c->expand(sizes);
    if (sizes.size() > 2) c = c.flatten(0, -3);
  }

  const at::Tensor addend = read_c ? c : o.bias.value_or(at::Tensor());
  const Activation activation = activation_of(kGemm, o.activation);
  // The library leaves out what has a factor of 0, and with it NaN.
  const auto vanishes = [&](double factor) {
    return (sums_dtype_of(a, b) == at::kDouble ? factor : static_cast<float>(factor)) == 0;
  };
  const bool low = !vanishes(o.alpha) && !(read_c && vanishes(o.beta)) &&
                   a.scalar_type() == b.scalar_type() && a.scalar_type() == out_dtype &&
                   (!is_gelu(activation) || rounds_before_activation(a)) && !(read_c && o.bias) &&
                   (addend.defined() ? addend.scalar_type() == out_dtype : o.alpha == 1);
  at::Tensor out;
  if (low) {
    out = low_product(left, right, addend, o.alpha, read_c ? o.beta : 1);
  } else {
    out = fp32_product(left, right);
    if (o.alpha != 1) out.mul_(o.alpha);
    if (read_c) out.add_(c, o.beta);
    if (o.bias) out.add_(*o.bias);
  }
  activate_(out, activation);
  if (out.scalar_type() != out_dtype) out = out.to(out_dtype);
  return out.dim() == static_cast<int64_t>(sizes.size()) ? out : out.view(sizes);
}

TensorPair torch_gemm_with_aux(const at::Tensor& a, const at::Tensor& b,
                               const GemmOptions& options) {
  const at::ScalarType out_dtype = out_dtype_of(a, b, options.out_dtype);
  at::Tensor x = sum(a, b, options);
  const at::Tensor aux = x.to(out_dtype, /*non_blocking=*/false, /*copy=*/true);
  activate_(x, activation_of(kGemmWithAux, options.activation));
  return {x.to(out_dtype), aux};
}

TensorPair torch_gemm_times_derivative(const at::Tensor& a, const at::Tensor& b,
                                       const at::Tensor& aux, const GemmOptions& options) {
  const at::Tensor x = sum(a, b, options);
  const at::Tensor out = activation_gradient(
      x, aux.to(x.scalar_type()), activation_of(kGemmTimesDerivative, options.activation));
  return {out.to(out_dtype_of(a, b, options.out_dtype)),
          out.flatten(0, -2).sum(0, /*keepdim=*/false, sums_dtype_of(a, b))};
}

void torch_gemm_accumulate_(const at::Tensor& c, const at::Tensor& a, const at::Tensor& b,
                            const GemmOptions& options) {
  GemmOptions wide_sum = options;
  wide_sum.out_dtype = sums_dtype_of(a, b);
  c.add_(torch_gemm(a, b, wide_sum));
}

}  // namespace amp_ext
