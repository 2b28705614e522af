// Computes matrix products by torch's own library.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>

#include "backends/backends.h"
#include "checks/tensors.h"
#include "gemm/gemm.h"

namespace amp_ext {
namespace {

// Returns `a` with zeros behind each row up to a multiple of the step: torch's products read so
// far, and multiply what they find by 0, which would spread NaNs.
at::Tensor padded(const at::Tensor& a) {
  const int64_t step = a.is_cpu() ? torchs_product_step(*dtype_of(a.scalar_type())) : 0;
  if (step == 0 || a.size(-1) % step == 0 || a.stride(-1) != 1) return a;
  return at::constant_pad_nd(a, {0, step - a.size(-1) % step}).narrow(-1, 0, a.size(-1));
}

// A product's tensors as torch's ops take them: matrices, or batches of them where there are
// several.
struct Operands {
  at::Tensor a, b, c, bias;  // c and bias may be undefined; c is not read with a beta of 0
  at::Tensor sum;            // where the product is added in memory: c
  at::ScalarType sums;
  at::DimVector sizes;  // of the result

  Operands(const GemmArgs& g, const GemmTensors& t) {
    const auto matrices = [&](const at::Tensor& tensor, const MatrixRef& x, int64_t rows,
                              int64_t columns, int64_t count) {
      const std::array sizes{rows, columns}, strides{x.row_stride, x.column_stride};
      const bool is_one = count == 1;
      if (is_one && tensor.sizes() == sizes && tensor.strides() == strides) return tensor;
      if (is_one) return tensor.as_strided(sizes, strides);
      return tensor.as_strided({count, rows, columns},
                               {x.batch_stride, x.row_stride, x.column_stride});
    };
    const int64_t products = g.batch * g.terms;
    a = matrices(t.a, g.a, g.m, g.k, products);
    b = matrices(t.b, g.b, g.k, g.n, products);
    if (g.terms != 1) {
      // One long product: the terms side by side in a, one below the other in b. (batch is 1.)
      a = a.transpose(0, 1).flatten(1);
      b = b.flatten(0, 1);
    }
    a = padded(a);
    if (t.c.defined()) c = matrices(t.c, g.c, g.m, g.n, g.batch);
    if (adds_to_out(g)) sum = c;
    bias = t.bias;
    sums = sums_dtype_of(a, b);
    if (g.batch != 1) sizes.push_back(g.batch);
    sizes.append({g.m, g.n});
  }
};

// Returns whether torch multiplies the operands, of 16 bits, into an FP32 result.
bool widens(const Operands& o, at::ScalarType type) {
  const at::ScalarType operands = o.a.scalar_type();
  return (operands == at::kHalf || operands == at::kBFloat16) && o.b.scalar_type() == operands &&
         type == at::kFloat && !o.a.is_cpu();
}

// Returns whether one op of torch computes alpha * a @ b + beta * c + bias, with a result of
// `type`. torch omits terms with a factor of 0, and would lose their NaN. (It adds an FP32 matrix
// to a product of 16 bits. Its documentation does not mention an FP32 bias.)
bool is_one_op(const Operands& o, const GemmArgs& g, at::ScalarType type) {
  const auto vanishes = [&](double factor) {
    return (o.sums == at::kDouble ? factor : static_cast<float>(factor)) == 0;
  };
  const at::Tensor& addend = o.c.defined() ? o.c : o.bias;
  const bool is_type = o.a.scalar_type() == type && o.b.scalar_type() == type;
  return (is_type || (widens(o, type) && !o.bias.defined())) && !vanishes(g.alpha) &&
         !(o.c.defined() && (o.bias.defined() || vanishes(g.beta))) &&
         (addend.defined() ? addend.scalar_type() == type : g.alpha == 1);
}

// Returns a @ b in the type of sums or of both operands.
at::Tensor multiply(const Operands& o, at::ScalarType type) {
  const bool is_batch = o.a.dim() == 3;
  if (widens(o, type)) return is_batch ? at::bmm(o.a, o.b, type) : at::mm(o.a, o.b, type);
  const at::Tensor a = o.a.to(type), b = o.b.to(type);
  return is_batch ? at::bmm(a, b) : at::mm(a, b);
}

// Returns alpha * a @ b + beta * addend, if is_one_op.
at::Tensor multiply_add(const Operands& o, const at::Tensor& addend, double beta, double alpha) {
  const at::ScalarType type = addend.scalar_type();
  const bool is_batch = o.a.dim() == 3;
  at::Tensor out = o.sum;
  if (!out.defined()) out = at::empty(o.sizes, o.a.options().dtype(type));
  if (widens(o, type)) {
    is_batch ? at::baddbmm_out(out, addend, o.a, o.b, type, beta, alpha)
             : at::addmm_out(out, addend, o.a, o.b, type, beta, alpha);
  } else {
    is_batch ? at::baddbmm_out(out, addend, o.a, o.b, beta, alpha)
             : at::addmm_out(out, addend, o.a, o.b, beta, alpha);
  }
  return out;
}

// Returns the result: of `type` if one op is enough, else of the type of sums.
at::Tensor sum_of_terms(const Operands& o, const GemmArgs& g, at::ScalarType type) {
  if (is_one_op(o, g, type)) {
    if (o.c.defined()) return multiply_add(o, o.c, g.beta, g.alpha);
    if (o.bias.defined()) return multiply_add(o, o.bias, 1, g.alpha);
    return multiply(o, type);
  }
  at::Tensor x = multiply(o, o.sums);
  if (g.alpha != 1) x.mul_(g.alpha);
  if (o.bias.defined()) x.add_(o.bias);
  if (o.sum.defined()) return o.sum.add_(x);  // beta is 1
  if (o.c.defined()) x.add_(o.c, g.beta);
  return x;
}

}  // namespace

at::Tensor library_gemm(const GemmArgs& g, const GemmTensors& tensors) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::NoGradGuard no_grad;
  // An active autocast would cast again.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const Operands o(g, tensors);
  const at::ScalarType type = scalar_type_of(g.out.dtype);
  // torch has no product of FP64 into another type.
  return sum_of_terms(o, g, o.sums == at::kDouble ? at::kDouble : type).to(type);
}

}  // namespace amp_ext
