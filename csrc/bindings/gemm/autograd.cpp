// Computes the derivative of gemm by differentiable ops. The derivative is linear in terms of gemm.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <mutex>
#include <vector>

#include "gemm/gemm.h"

namespace amp_ext {
namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// Makes a node. Older versions of torch hold nodes by std::shared_ptr.
template <class T>
auto make_node() {
  if constexpr (std::is_same_v<decltype(torch::autograd::Edge::function), std::shared_ptr<Node>>) {
    return std::shared_ptr<T>(new T(), [](T* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<T>();
  }
}

// Returns the type that the gradient of `tensor` has to have. It is not always the tensor's own: an
// FP16 copy may take the place of its FP32 original (autocast/weight_copies.h). The grad_dtype of a
// 16-bit leaf may be FP32. It may also be none, and then allows FP32.
at::ScalarType gradient_type(const at::Tensor& tensor) {
  if (!tensor.requires_grad()) return tensor.scalar_type();
  const auto edge = torch::autograd::impl::gradient_edge(tensor);
  if (!edge.is_valid()) return tensor.scalar_type();
  const auto& metadata = edge.function->input_metadata(edge.input_nr);
  const auto type = c10::typeMetaToScalarType(metadata.options().dtype());
  const bool may_be_wide = metadata.grad_dtype().value_or(at::kFloat) == at::kFloat;
  return at::isReducedFloatingType(type) && may_be_wide ? at::kFloat : type;
}

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
      // torch adds 16-bit elements in FP32; on a CPU it would copy them for an FP32 result. A sum
      // to one element would be rounded in each thread.
      const bool is_one = TORCH_GUARD_OR_FALSE(c10::multiply_integers(sizes).sym_eq(1));
      const bool keeps_type = factor == 1 && type == grad.scalar_type() && !is_one;
      const at::ScalarType sums = keeps_type ? type : wide(grad.scalar_type());
      result = at::sum(grad, dims, /*keepdim=*/true, sums);
      for (int64_t d = 0; d < lead; ++d) result = result.squeeze(0);
    }
    if (factor != 1) result = result.to(wide(type)).mul(factor);
    return result.to(type);
  }

  std::vector<c10::SymInt> sizes;
  at::ScalarType type = at::kFloat;
};

// The backward pass of gemm.
struct GemmBackward final : Node {
  // The order of the arguments of addmm and linear: hooks of leaves fire in it.
  enum Input { kC, kA, kB, kBias, kInputs };

  std::string name() const override { return "GemmBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    a_.reset_data();
    b_.reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    variable_list results(kInputs);
    const at::Tensor& grad = grads[0];
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

  bool trans_a, trans_b;
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

  SavedVariable a_, b_;
};

// Returns the result with a history.
at::Tensor recorded_gemm(const at::Tensor& a, const at::Tensor& b, const GemmOptions& options) {
  const auto node = make_node<GemmBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(options.c, a, b, options.bias));
  node->trans_a = options.trans_a;
  node->trans_b = options.trans_b;
  node->alpha = options.alpha;
  node->beta = options.beta;
  node->a_dim = a.dim();
  node->b_dim = b.dim();
  node->a_type = gradient_type(a);
  node->b_type = gradient_type(b);
  if (options.c && options.c->requires_grad()) node->c = Addend(*options.c);
  if (options.bias && options.bias->requires_grad()) node->bias = Addend(*options.bias);
  node->save(a, b);  // before the product: a checkpoint may not need to compute it again
  const at::Tensor out = [&] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return gemm(a, b, options);
  }();
  torch::autograd::set_history(out, node);
  return out;
}

at::Tensor gemm_autograd(const at::Tensor& a, const at::Tensor& b, const GemmOptions& options) {
  using torch::autograd::isFwGradDefined;
  TORCH_CHECK_NOT_IMPLEMENTED(!isFwGradDefined(a) && !isFwGradDefined(b) &&
                                  !isFwGradDefined(options.c) && !isFwGradDefined(options.bias),
                              kGemm, ": forward-mode differentiation is not implemented");
  if (torch::autograd::compute_requires_grad(a, b, options.c, options.bias))
    return recorded_gemm(a, b, options);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return gemm(a, b, options);
}

}  // namespace

TORCH_LIBRARY_IMPL(amp_ext, Autograd, m) { m.impl("gemm", TORCH_FN(gemm_op<gemm_autograd>)); }

}  // namespace amp_ext
