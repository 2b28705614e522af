// The derivative of gemm, itself made of differentiable ops, and linear in terms of gemm.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/threshold_backward.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <mutex>

#include "gemm.h"

namespace amp_ext {
namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using NodePtr = decltype(torch::autograd::Edge::function);

// Older versions of torch hold nodes by std::shared_ptr.
template <class T>
auto make_node() {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<Node>>) {
    return std::shared_ptr<T>(new T(), [](T* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<T>();
  }
}

// The type that the gradient of `tensor` shall have. It is not always the tensor's own: an FP16
// copy may stand for its FP32 original (lowered.h).
at::ScalarType gradient_type(const at::Tensor& tensor) {
  if (!tensor.requires_grad()) return tensor.scalar_type();
  const auto edge = torch::autograd::impl::gradient_edge(tensor);
  if (!edge.is_valid()) return tensor.scalar_type();
  return c10::typeMetaToScalarType(edge.function->input_metadata(edge.input_nr).options().dtype());
}

at::ScalarType wide(at::ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }

// An addend of the result.
struct Addend {
  Addend() = default;
  explicit Addend(const at::Tensor& tensor)
      : sizes(tensor.sym_sizes().vec()), type(gradient_type(tensor)) {}

  at::Tensor gradient(const at::Tensor& grad, double factor) const {
    at::Tensor result = grad;
    if (grad.sym_sizes() != c10::SymIntArrayRef(sizes)) {
      std::vector<int64_t> dims;
      const int64_t lead = grad.dim() - static_cast<int64_t>(sizes.size());
      for (int64_t d = 0; d < grad.dim(); ++d) {
        if (d < lead || (sizes[d - lead] == 1 && grad.sym_size(d) != 1)) dims.push_back(d);
      }
      result = at::sum(grad, dims, /*keepdim=*/true, wide(grad.scalar_type())).view_symint(sizes);
    }
    if (factor != 1) result = result.to(wide(type)).mul(factor);
    return result.to(type);
  }

  std::vector<c10::SymInt> sizes;
  at::ScalarType type = at::kFloat;
};

struct GemmBackward final : Node {
  std::string name() const override { return "GemmBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    a_.reset_data();
    b_.reset_data();
    out_.reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    variable_list results(4);
    at::Tensor grad = grads[0];
    if (!grad.defined()) return results;
    if (relu) grad = at::threshold_backward(grad, out_.unpack(), 0);
    if (task_should_compute_output(0)) results[0] = gradient_of_a(grad);
    if (task_should_compute_output(1)) results[1] = gradient_of_b(grad);
    if (task_should_compute_output(2)) results[2] = c.gradient(grad, beta);
    if (task_should_compute_output(3)) results[3] = bias.gradient(grad, 1);
    return results;
  }

  // Called before the result has a history.
  void save(const at::Tensor& a, const at::Tensor& b, const at::Tensor& out) {
    if (should_compute_output(1)) a_ = SavedVariable(a, false);
    if (should_compute_output(0)) b_ = SavedVariable(b, false);
    if (relu) out_ = SavedVariable(out.detach(), false);
  }

  bool trans_a, trans_b, relu;
  double alpha, beta;
  int64_t a_dim, b_dim;
  at::ScalarType a_type, b_type;
  Addend c, bias;

 private:
  // An operand without leading dimensions serves every matrix of the batch: its gradient is a sum.
  at::Tensor product(const at::Tensor& left, const at::Tensor& right, bool trans_left,
                     bool trans_right, bool sum, at::ScalarType type) const {
    GemmOptions options;
    options.sum_batch = sum && left.dim() > 2;
    options.trans_a = trans_left;
    options.trans_b = trans_right;
    options.alpha = alpha;
    options.out_dtype = type;
    return gemm(left, right, options);
  }

  // No view is taken of a or b: its gradient would have the type of the low-precision copy.
  at::Tensor gradient_of_a(const at::Tensor& grad) const {
    const at::Tensor b = b_.unpack();
    const bool sum = a_dim == 2;
    return trans_a ? product(b, grad, trans_b, true, sum, a_type)
                   : product(grad, b, false, !trans_b, sum, a_type);
  }

  at::Tensor gradient_of_b(const at::Tensor& grad) const {
    const at::Tensor a = a_.unpack();
    const bool sum = b_dim == 2;
    return trans_b ? product(grad, a, true, trans_a, sum, b_type)
                   : product(a, grad, !trans_a, false, sum, b_type);
  }

  SavedVariable a_, b_, out_;
};

bool has_forward_gradient(const std::optional<at::Tensor>& tensor) {
  return torch::autograd::isFwGradDefined(tensor);
}

at::Tensor gemm_autograd(const at::Tensor& a, const at::Tensor& b, bool trans_a, bool trans_b,
                         bool sum_batch, const std::optional<at::Tensor>& c, double alpha,
                         double beta, const std::optional<at::Tensor>& bias,
                         std::string_view activation, std::optional<at::ScalarType> out_dtype) {
  TORCH_CHECK_NOT_IMPLEMENTED(!has_forward_gradient(a) && !has_forward_gradient(b) &&
                                  !has_forward_gradient(c) && !has_forward_gradient(bias),
                              "amp_ext::gemm: forward-mode differentiation is not implemented");
  const GemmOptions options{trans_a, trans_b, sum_batch,  c,        alpha,
                            beta,    bias,    activation, out_dtype};
  const auto run = [&] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return gemm(a, b, options);
  };
  if (!torch::autograd::compute_requires_grad(a, b, c, bias)) return run();

  const auto node = make_node<GemmBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(a, b, c, bias));
  node->trans_a = trans_a;
  node->trans_b = trans_b;
  node->relu = activation == "relu";
  node->alpha = alpha;
  node->beta = beta;
  node->a_dim = a.dim();
  node->b_dim = b.dim();
  node->a_type = gradient_type(a);
  node->b_type = gradient_type(b);
  if (c && c->requires_grad()) node->c = Addend(*c);
  if (bias && bias->requires_grad()) node->bias = Addend(*bias);
  const at::Tensor out = run();
  node->save(a, b, out);
  torch::autograd::set_history(out, node);
  return out;
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias, std::string_view activation) {
  constexpr auto op = "amp_ext::linear";
  check_operand(op, "x", x, x.device());
  check_operand(op, "weight", weight, x.device());
  if (bias) check_operand(op, "bias", *bias, x.device());
  activation_of(op, activation);
  TORCH_CHECK(weight.dim() == 2, op, ": weight must have 2 dimensions, got shape ",
              weight.sym_sizes());
  TORCH_CHECK(x.dim() >= 1 && x.sym_size(-1) == weight.sym_size(1), op, ": x must have ",
              weight.sym_size(1), " columns for a weight of shape ", weight.sym_sizes(),
              ", got shape ", x.sym_sizes());
  TORCH_CHECK(!bias || (bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0)), op,
              ": bias must have shape [", weight.sym_size(0), "], got shape ", bias->sym_sizes());
  GemmOptions options;
  options.trans_b = true;
  options.bias = bias;
  options.activation = activation;
  if (x.dim() == 1) return gemm(x.unsqueeze(0), weight, options).squeeze(0);
  return gemm(x, weight, options);
}

}  // namespace

TORCH_LIBRARY_IMPL(amp_ext, Autograd, m) { m.impl("gemm", TORCH_FN(gemm_autograd)); }
TORCH_LIBRARY_IMPL(amp_ext, CompositeImplicitAutograd, m) { m.impl("linear", TORCH_FN(linear)); }

}  // namespace amp_ext
