// Matrix products by torch's own library.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/clamp_min.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/hardtanh.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/threshold_backward.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "backends/backends.h"
#include "checks/tensors.h"
#include "gemm/gemm.h"

namespace amp_ext {
namespace {

// A product's arguments as torch's ops take them: matrices, or batches of them where there are
// several.
struct Operands {
  at::Tensor a, b, out;
  at::Tensor c, bias, aux;  // undefined where there is none; c is not read with a beta of 0
  at::ScalarType sums;
  bool adds_to_out;

  Operands(const GemmArgs& g, c10::Device device)
      : adds_to_out(g.c.data && g.c.data == g.out.data && g.beta != 0) {
    const auto matrices = [&](const MatrixRef& x, int64_t rows, int64_t columns) {
      return g.batch == 1 ? tensor_of(x, rows, columns, device)
                          : tensor_of(x, g.batch, rows, columns, device);
    };
    if (g.terms != 1) {
      // One long product: the terms side by side in a, one below the other in b. (batch is 1.)
      a = tensor_of(g.a, g.terms, g.m, g.k, device).transpose(0, 1).flatten(1);
      b = tensor_of(g.b, g.terms, g.k, g.n, device).flatten(0, 1);
    } else {
      a = matrices(g.a, g.m, g.k);
      b = matrices(g.b, g.k, g.n);
    }
    out = matrices(g.out, g.m, g.n);
    if (adds_to_out) {
      c = out;
    } else if (g.c.data && g.beta != 0) {
      c = matrices(g.c, g.m, g.n);
    }
    if (g.bias.data) bias = tensor_of(g.bias, g.n, device);
    if (g.aux.data) aux = matrices(g.aux, g.m, g.n);
    sums = sums_dtype_of(a, b);
  }
};

at::Tensor like(const at::Tensor& out, at::ScalarType type) {
  return at::empty(out.sizes(), out.options().dtype(type));
}

// torch's word for which of the two it is.
c10::string_view approximation(Activation activation) {
  return activation == Activation::gelu_tanh ? "tanh" : "none";
}

// out = activation(x), of one type. They may be the same tensor.
void activate(at::Tensor& out, const at::Tensor& x, Activation activation) {
  if (activation == Activation::relu) {
    at::clamp_min_out(out, x, 0);
  } else if (activation == Activation::silu) {
    at::silu_out(out, x);
  } else if (activation != Activation::none) {
    at::gelu_out(out, x, approximation(activation));
  } else if (!x.is_same(out)) {
    out.copy_(x);
  }
}

// x within a range beyond which derivatives are 0 or 1, as at infinities, for which torch returns
// NaN; torch squares the argument of a gelu. Unlike a clamp, hardtanh has NaN as derivative at NaN.
at::Tensor bounded(const at::Tensor& x, Activation activation) {
  const double bound = activation == Activation::silu ? 1e3 : 40;
  return at::hardtanh(x, -bound, bound);
}

// out = grad * activation'(x), of one type.
void differentiate(at::Tensor& out, const at::Tensor& grad, const at::Tensor& x,
                   Activation activation) {
  if (activation == Activation::relu) {
    at::threshold_backward_out(out, grad, x, 0);
  } else if (activation == Activation::silu) {
    at::silu_backward_out(out, grad, bounded(x, activation));
  } else if (activation != Activation::none) {
    at::gelu_backward_out(out, grad, bounded(x, activation), approximation(activation));
  } else {
    out.copy_(grad);
  }
}

// Whether an activation is applied to a sum that is already rounded to the result's type: on a CPU
// the library computes products of fp64, and of a 16-bit type into that type.
bool rounds_before_activation(const Operands& o) { return o.a.is_cpu(); }

// Whether torch multiplies the operands, of 16 bits, into an FP32 result.
bool widens(const Operands& o, at::ScalarType type) {
  const at::ScalarType operands = o.a.scalar_type();
  return (operands == at::kHalf || operands == at::kBFloat16) && o.b.scalar_type() == operands &&
         type == at::kFloat && !o.a.is_cpu();
}

// Whether torch computes alpha * a @ b + beta * c + bias with a result of `type` by one op. torch
// omits terms whose factor is 0, and would lose their NaN. (It adds an FP32 matrix to a product of
// 16 bits; of an FP32 bias its documentation says nothing.)
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

// out = a @ b, in the type of out, which is that of sums or of both operands.
void multiply(const Operands& o, at::Tensor& out) {
  const at::ScalarType type = out.scalar_type();
  const bool is_batch = o.a.dim() == 3;
  if (widens(o, type)) {
    is_batch ? at::bmm_out(out, o.a, o.b, type) : at::mm_out(out, o.a, o.b, type);
  } else {
    const at::Tensor a = o.a.to(type), b = o.b.to(type);
    is_batch ? at::bmm_out(out, a, b) : at::mm_out(out, a, b);
  }
}

// out = alpha * a @ b + beta * addend, where is_one_op.
void multiply_add(const Operands& o, at::Tensor& out, const at::Tensor& addend, double beta,
                  double alpha) {
  const at::ScalarType type = out.scalar_type();
  const bool is_batch = o.a.dim() == 3;
  if (widens(o, type)) {
    is_batch ? at::baddbmm_out(out, addend, o.a, o.b, type, beta, alpha)
             : at::addmm_out(out, addend, o.a, o.b, type, beta, alpha);
  } else {
    is_batch ? at::baddbmm_out(out, addend, o.a, o.b, beta, alpha)
             : at::addmm_out(out, addend, o.a, o.b, beta, alpha);
  }
}

// The sum before its activation: of the type of o.out where one op is enough, else of the type of
// sums. It is in `out` if that is given and of this type.
at::Tensor sum_of_terms(const Operands& o, const GemmArgs& g, at::Tensor out, at::ScalarType type) {
  if (is_one_op(o, g, type)) {
    if (!out.defined() || out.scalar_type() != type) out = like(o.out, type);
    if (o.c.defined()) {
      multiply_add(o, out, o.c, g.beta, g.alpha);
    } else if (o.bias.defined()) {
      multiply_add(o, out, o.bias, 1, g.alpha);
    } else {
      multiply(o, out);
    }
    return out;
  }
  if (!out.defined() || out.scalar_type() != o.sums || o.adds_to_out) out = like(o.out, o.sums);
  multiply(o, out);
  if (g.alpha != 1) out.mul_(g.alpha);
  if (o.bias.defined()) out.add_(o.bias);
  if (o.adds_to_out) return o.out.add_(out);  // beta is 1
  if (o.c.defined()) out.add_(o.c, g.beta);
  return out;
}

class TorchLibrary final : public Backend {
 public:
  const char* name() const override { return "library"; }

#define AMP_EXT_NOT_BUILT(op, Args) \
  Status op(const Args&, Services&) const override { return Status::not_built; }
  AMP_EXT_LIST_OPS(AMP_EXT_NOT_BUILT)
#undef AMP_EXT_NOT_BUILT

  const char* why_not(const GemmArgs&) const override { return nullptr; }

  Status gemm(const GemmArgs& g, Services& services) const override {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    // An active autocast would cast again.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const c10::Device device = device_of(services);
    Operands o(g, device);
    if (g.derivative && o.out.numel() == 0) {
      tensor_of({g.column_sums, *dtype_of(o.sums), 1}, g.n, device).zero_();
      return Status::ok;
    }
    const at::ScalarType rounded = o.out.scalar_type();
    const bool rounds_first = rounds_before_activation(o) && o.sums != at::kDouble;
    if (!o.aux.defined()) {
      const bool may_round = !is_curved(g.activation) || rounds_before_activation(o);
      at::Tensor x = sum_of_terms(o, g, o.out, may_round ? rounded : o.sums);
      activate(x, x, g.activation);
      if (!x.is_same(o.out)) o.out.copy_(x);
    } else if (!g.derivative) {
      at::Tensor x = sum_of_terms(o, g, o.aux, rounds_first ? rounded : o.sums);
      if (!x.is_same(o.aux)) o.aux.copy_(x);
      at::Tensor& result = x.scalar_type() == rounded ? o.out : x;
      activate(result, x, g.activation);
      if (!result.is_same(o.out)) o.out.copy_(result);
    } else {
      const at::Tensor x = sum_of_terms(o, g, {}, rounds_first ? rounded : o.sums);
      at::Tensor result = x.scalar_type() == rounded ? o.out : like(o.out, x.scalar_type());
      differentiate(result, x, o.aux.to(x.scalar_type()), g.activation);
      if (!result.is_same(o.out)) o.out.copy_(result);
      at::Tensor sums = tensor_of({g.column_sums, *dtype_of(o.sums), 1}, g.n, device);
      at::sum_out(sums, result.flatten(0, -2), 0, /*keepdim=*/false, sums.scalar_type());
    }
    return Status::ok;
  }
};

}  // namespace

at::Tensor activated(const at::Tensor& x, Activation activation) {
  if (activation == Activation::none) return x;
  if (activation == Activation::relu) return at::relu(x);
  if (activation == Activation::silu) return at::silu(x);
  return at::gelu(x, approximation(activation));
}

at::Tensor activation_gradient(const at::Tensor& grad, const at::Tensor& x, Activation activation) {
  if (activation == Activation::none) return grad;
  if (activation == Activation::relu) return at::threshold_backward(grad, x, 0);
  const at::Tensor near = bounded(x, activation);
  if (activation != Activation::silu)
    return at::gelu_backward(grad, near, approximation(activation));
  if (!at::GradMode::is_enabled()) return at::silu_backward(grad, near);
  // torch has no derivative of silu_backward. One minus the sigmoid would cancel.
  const at::Tensor sigmoid = at::sigmoid(near), rest = at::sigmoid(at::neg(near));
  return at::mul(grad, at::addcmul(sigmoid, at::mul(near, sigmoid), rest));
}

const Backend& torch_library() {
  static const TorchLibrary backend;
  return backend;
}

}  // namespace amp_ext
