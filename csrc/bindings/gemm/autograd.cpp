// Computes the derivative of gemm by differentiable ops. The derivative is linear in terms of gemm.
#include "gemm/autograd.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/add.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <mutex>

namespace amp_ext {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

at::ScalarType gradient_type(const at::Tensor& tensor) {
  if (!tensor.requires_grad()) return tensor.scalar_type();
  const auto edge = torch::autograd::impl::gradient_edge(tensor);
  if (!edge.is_valid()) return tensor.scalar_type();
  const auto& metadata = edge.function->input_metadata(edge.input_nr);
  const auto type = c10::typeMetaToScalarType(metadata.options().dtype());
  const bool may_be_wide = metadata.grad_dtype().value_or(at::kFloat) == at::kFloat;
  return at::isReducedFloatingType(type) && may_be_wide ? at::kFloat : type;
}

at::Tensor Addend::gradient(const at::Tensor& grad, double factor) const {
  at::Tensor result = grad;
  if (grad.sym_sizes() != c10::SymIntArrayRef(sizes)) {
    std::vector<int64_t> dims;
    const int64_t lead = grad.dim() - static_cast<int64_t>(sizes.size());
    for (int64_t d = 0; d < grad.dim(); ++d) {
      if (d < lead || (sizes[d - lead] == 1 && grad.sym_size(d) != 1)) dims.push_back(d);
    }
    // torch adds 16-bit elements in FP32; on a CPU it would copy them for an FP32 result.
    const at::ScalarType sums =
        factor == 1 && type == grad.scalar_type() ? type : wide(grad.scalar_type());
    result = at::sum(grad, dims, /*keepdim=*/true, sums).view_symint(sizes);
  }
  if (factor != 1) result = result.to(wide(type)).mul(factor);
  return result.to(type);
}

at::Tensor total(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() && b.defined() ? at::add(a, b) : a.defined() ? a : b;
}

namespace {

// The backward pass of gemm. Its outputs are the result and, if the activation is curved, the
// pre-activation x = alpha * a @ b + beta * c + bias. Only backward passes see x: the derivative of
// the result depends on x, and x on the inputs.
struct GemmBackward final : Node {
  // The order of the arguments of addmm and linear: hooks of leaves fire in it.
  enum Input { kC, kA, kB, kBias, kInputs };

  std::string name() const override { return "GemmBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    a_.reset_data();
    b_.reset_data();
    activated_.reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    variable_list results(kInputs);
    at::Tensor grad = grads[0];
    if (grad.defined() && activation != Activation::none)
      grad = activation_gradient(grad, activated_.unpack(getptr()), activation);
    if (grads.size() > 1) grad = total(grad, grads[1]);
    if (!grad.defined()) return results;
    if (task_should_compute_output(kC)) results[kC] = c.gradient(grad, beta);
    if (task_should_compute_output(kA)) results[kA] = gradient_of_a(grad);
    if (task_should_compute_output(kB)) results[kB] = gradient_of_b(grad);
    if (task_should_compute_output(kBias)) results[kBias] = bias.gradient(grad, 1);
    return results;
  }

  void save(const at::Tensor& a, const at::Tensor& b) {
    if (should_compute_output(kB)) a_ = SavedVariable(a, false);
    if (should_compute_output(kA)) b_ = SavedVariable(b, false);
  }
  // Saves the tensor that activation_gradient needs.
  void save_activated(const at::Tensor& tensor, bool is_output) {
    activated_ = SavedVariable(tensor, is_output);
  }

  bool trans_a, trans_b;
  Activation activation;
  double alpha, beta;
  int64_t a_dim, b_dim;
  at::ScalarType a_type, b_type;
  Addend c, bias;

 private:
  // An operand without leading dimensions is shared by the batch: its gradient is a sum.
  GemmOptions options(const at::Tensor& left, bool trans_left, bool trans_right, bool sum,
                      at::ScalarType type) const {
    return {.trans_a = trans_left,
            .trans_b = trans_right,
            .sum_batch = sum && left.dim() > 2,
            .alpha = alpha,
            .out_dtype = type};
  }

  // No view is taken of a or b: its gradient would have the type of the low-precision copy.
  at::Tensor gradient_of_a(const at::Tensor& grad) const {
    const at::Tensor b = b_.unpack();
    const bool sum = a_dim == 2;
    return trans_a ? gemm(b, grad, options(b, trans_b, true, sum, a_type))
                   : gemm(grad, b, options(grad, false, !trans_b, sum, a_type));
  }

  at::Tensor gradient_of_b(const at::Tensor& grad) const {
    const at::Tensor a = a_.unpack();
    const bool sum = b_dim == 2;
    return trans_b ? gemm(grad, a, options(grad, true, trans_a, sum, b_type))
                   : gemm(a, grad, options(a, !trans_a, false, sum, b_type));
  }

  SavedVariable a_, b_, activated_;
};

// Returns the result and, if `with_aux`, the pre-activation, both with a history.
TensorPair recorded_gemm(const at::Tensor& a, const at::Tensor& b, const GemmOptions& options,
                         bool with_aux) {
  const auto node = make_node<GemmBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(options.c, a, b, options.bias));
  node->trans_a = options.trans_a;
  node->trans_b = options.trans_b;
  node->activation = activation_of(kGemm, options.activation);
  node->alpha = options.alpha;
  node->beta = options.beta;
  node->a_dim = a.dim();
  node->b_dim = b.dim();
  node->a_type = gradient_type(a);
  node->b_type = gradient_type(b);
  if (options.c && options.c->requires_grad()) node->c = Addend(*options.c);
  if (options.bias && options.bias->requires_grad()) node->bias = Addend(*options.bias);
  node->save(a, b);  // before the product: a checkpoint may not need to compute it again
  at::Tensor out, x;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (with_aux) {
      std::tie(out, x) = gemm_with_aux(a, b, options);
    } else {
      out = gemm(a, b, options);
    }
  }
  if (node->activation == Activation::relu) node->save_activated(out.detach(), /*is_output=*/false);
  torch::autograd::set_history(out, node);
  if (with_aux) torch::autograd::set_history(x, node);
  if (is_curved(node->activation)) node->save_activated(x, /*is_output=*/true);
  return {out, x};
}

at::Tensor gemm_autograd(const at::Tensor& a, const at::Tensor& b, const GemmOptions& options) {
  check_no_forward_gradient(kGemm, a, b, options.c, options.bias);
  if (!torch::autograd::compute_requires_grad(a, b, options.c, options.bias)) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return gemm(a, b, options);
  }
  const bool with_aux = is_curved(activation_of(kGemm, options.activation));
  return std::get<0>(recorded_gemm(a, b, options, with_aux));
}

TensorPair gemm_with_aux_autograd(const at::Tensor& a, const at::Tensor& b,
                                  const GemmOptions& options) {
  check_no_forward_gradient(kGemmWithAux, a, b, options.c, options.bias);
  if (torch::autograd::compute_requires_grad(a, b, options.c, options.bias))
    return recorded_gemm(a, b, options, /*with_aux=*/true);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return gemm_with_aux(a, b, options);
}

// Calls an op that has no derivative.
void call_undifferentiated(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string& name = op.schema().name();
  for (const c10::IValue& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (!value.isTensor()) continue;
    const at::Tensor tensor = value.toTensor();
    TORCH_CHECK(!torch::autograd::compute_requires_grad(tensor), name,
                ": is not differentiable, expected no tensor that requires a gradient: call it "
                "under torch.no_grad()");
    check_no_forward_gradient(name.c_str(), tensor);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  op.callBoxed(*stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(amp_ext, Autograd, m) {
  m.impl("gemm", TORCH_FN(gemm_op<gemm_autograd>));
  m.impl("gemm_with_aux", TORCH_FN(gemm_op<gemm_with_aux_autograd>));
  m.impl("gemm_accumulate_", torch::CppFunction::makeFromBoxedFunction<&call_undifferentiated>());
}

}  // namespace amp_ext
