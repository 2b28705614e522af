// linear and mlp: products with weights as torch.nn.Linear stores them.
#include "gemm/linear.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <mutex>

#include "gemm/autograd.h"

namespace amp_ext {

void check_layer(const char* op, const char* entering_name, const at::Tensor& entering, int64_t dim,
                 const char* weight_name, const at::Tensor& weight, const char* bias_name,
                 const OptionalTensor& bias) {
  check_operand(op, weight_name, weight, entering.device());
  if (bias) check_operand(op, bias_name, *bias, entering.device());
  TORCH_CHECK(weight.dim() == 2, op, ": ", weight_name, " must have 2 dimensions, got shape ",
              weight.sym_sizes());
  TORCH_CHECK(entering.dim() >= 1 && entering.sym_size(dim) == weight.sym_size(1), op, ": ",
              entering_name, " must have ", weight.sym_size(1), dim == 0 ? " rows" : " columns",
              " for ", weight_name, " of shape ", weight.sym_sizes(), ", got shape ",
              entering.sym_sizes());
  TORCH_CHECK(!bias || (bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0)), op, ": ",
              bias_name, " must have shape [", weight.sym_size(0), "], got shape ",
              bias->sym_sizes());
}

namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

constexpr auto kLinear = "amp_ext::linear";
constexpr auto kMlp = "amp_ext::mlp";

at::Tensor linear_op(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                     std::string_view activation) {
  check_operand(kLinear, "x", x, x.device());
  activation_of(kLinear, activation);
  check_layer(kLinear, "x", x, -1, "weight", weight, "bias", bias);
  if (x.dim() == 1) return linear_op(x.unsqueeze(0), weight, bias, activation).squeeze(0);
  return gemm(x, weight, layer(bias, activation));
}

void check_mlp(const at::Tensor& x, const at::Tensor& weight1, const OptionalTensor& bias1,
               const at::Tensor& weight2, const OptionalTensor& bias2,
               std::string_view activation) {
  check_operand(kMlp, "x", x, x.device());
  activation_of(kMlp, activation);
  check_layer(kMlp, "x", x, -1, "weight1", weight1, "bias1", bias1);
  check_layer(kMlp, "weight1", weight1, 0, "weight2", weight2, "bias2", bias2);
}

// Its outputs are the hidden layer, where the activation is curved what that was applied to, and
// the result: backward passes see the former, as those of GemmBackward.
struct MlpBackward final : Node {
  enum Input { kX, kWeight1, kBias1, kWeight2, kBias2, kInputs };

  std::string name() const override { return "MlpBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable* saved : {&x, &weight1, &weight2, &hidden, &before}) saved->reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    variable_list results(kInputs);
    const at::Tensor &grad = grads.back(), &grad_hidden = grads[0];
    const at::Tensor grad_before = grads.size() > 2 ? grads[1] : at::Tensor();
    const auto wanted = [&](Input input) { return task_should_compute_output(input); };
    const bool wants_inner = wanted(kX) || wanted(kWeight1) || wanted(kBias1);
    const Activation kind = activation_of(kMlp, activation);

    // All at once, before a gradient is written, and each once, as checkpoints let it be.
    at::Tensor out_of_first, activated, second, entered, first;
    if ((grad.defined() && wanted(kWeight2)) || (wants_inner && !is_curved(kind)))
      out_of_first = hidden.unpack(getptr());
    if (wants_inner) activated = is_curved(kind) ? before.unpack(getptr()) : out_of_first;
    if (wants_inner && grad.defined()) second = weight2.unpack();
    if (wanted(kWeight1)) entered = x.unpack();
    if (wanted(kX)) first = weight1.unpack();

    if (grad.defined()) {
      if (wanted(kWeight2)) results[kWeight2] = weight_gradient(grad, out_of_first, weight2_type);
      if (wanted(kBias2)) results[kBias2] = bias2.gradient(grad, 1);
    }
    if (!wants_inner) return results;

    // The gradient of what the activation is applied to.
    at::Tensor inner, column_sums;
    const bool only_result = grad.defined() && !grad_hidden.defined() && !grad_before.defined();
    GemmOptions options{.out_dtype = hidden_type};
    if (only_result && !at::GradMode::is_enabled()) {
      options.activation = activation;
      std::tie(inner, column_sums) = gemm_times_derivative(grad, second, activated, options);
    } else {
      if (grad.defined()) inner = gemm(grad, second, options);
      inner = total(inner, grad_hidden);
      if (inner.defined()) inner = activation_gradient(inner, activated, kind);
      inner = total(inner, grad_before);
    }
    if (!inner.defined()) return results;
    if (wanted(kBias1)) {
      results[kBias1] =
          column_sums.defined() ? column_sums.to(bias1.type) : bias1.gradient(inner, 1);
    }
    if (wanted(kWeight1)) results[kWeight1] = weight_gradient(inner, entered, weight1_type);
    if (wanted(kX)) results[kX] = gemm(inner, first, {.out_dtype = x_type});
    return results;
  }

  SavedVariable x, weight1, weight2, hidden, before;
  std::string activation;
  at::ScalarType x_type, weight1_type, weight2_type, hidden_type;
  Addend bias1, bias2;
};

at::Tensor mlp_op(const at::Tensor& x, const at::Tensor& weight1, const OptionalTensor& bias1,
                  const at::Tensor& weight2, const OptionalTensor& bias2,
                  std::string_view activation) {
  check_mlp(x, weight1, bias1, weight2, bias2, activation);
  const at::Tensor rows = x.dim() == 1 ? x.unsqueeze(0) : x;
  const at::Tensor hidden = gemm(rows, weight1, layer(bias1, activation));
  const at::Tensor out = gemm(hidden, weight2, layer(bias2));
  return x.dim() == 1 ? out.squeeze(0) : out;
}

at::Tensor mlp_autograd(const at::Tensor& x, const at::Tensor& weight1, const OptionalTensor& bias1,
                        const at::Tensor& weight2, const OptionalTensor& bias2,
                        std::string_view activation) {
  check_mlp(x, weight1, bias1, weight2, bias2, activation);
  check_no_forward_gradient(kMlp, x, weight1, bias1, weight2, bias2);
  if (x.dim() == 1) {
    return mlp_autograd(x.unsqueeze(0), weight1, bias1, weight2, bias2, activation).squeeze(0);
  }
  if (!torch::autograd::compute_requires_grad(x, weight1, bias1, weight2, bias2)) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return mlp_op(x, weight1, bias1, weight2, bias2, activation);
  }
  const auto node = make_node<MlpBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(x, weight1, bias1, weight2, bias2));
  const auto wants = [&](MlpBackward::Input input) { return node->should_compute_output(input); };
  const bool wants_inner =
      wants(MlpBackward::kX) || wants(MlpBackward::kWeight1) || wants(MlpBackward::kBias1);
  node->activation = activation;
  node->x_type = gradient_type(x);
  node->weight1_type = gradient_type(weight1);
  node->weight2_type = gradient_type(weight2);
  if (bias1 && bias1->requires_grad()) node->bias1 = Addend(*bias1);
  if (bias2 && bias2->requires_grad()) node->bias2 = Addend(*bias2);
  // Each before the product that it enters, which a checkpoint may not need again.
  if (wants(MlpBackward::kWeight1)) node->x = SavedVariable(x, false);
  if (wants(MlpBackward::kX)) node->weight1 = SavedVariable(weight1, false);
  if (wants_inner) node->weight2 = SavedVariable(weight2, false);
  at::Tensor hidden, before, out;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (wants_inner && is_curved(activation_of(kMlp, activation))) {
      std::tie(hidden, before) = gemm_with_aux(x, weight1, layer(bias1, activation));
    } else {
      hidden = gemm(x, weight1, layer(bias1, activation));
    }
  }
  node->hidden_type = hidden.scalar_type();
  torch::autograd::set_history(hidden, node);
  if (wants(MlpBackward::kWeight2) || (wants_inner && !before.defined()))
    node->hidden = SavedVariable(hidden, /*is_output=*/true);
  if (before.defined()) {
    torch::autograd::set_history(before, node);
    node->before = SavedVariable(before, /*is_output=*/true);
  }
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    out = gemm(hidden, weight2, layer(bias2));
  }
  torch::autograd::set_history(out, node);
  return out;
}

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                  std::string_view activation) {
  static const auto op = typed_op<decltype(linear_op)>(kLinear);
  return op.call(x, weight, bias, activation);
}

at::Tensor mlp(const at::Tensor& x, const at::Tensor& weight1, const OptionalTensor& bias1,
               const at::Tensor& weight2, const OptionalTensor& bias2,
               std::string_view activation) {
  static const auto op = typed_op<decltype(mlp_op)>(kMlp);
  return op.call(x, weight1, bias1, weight2, bias2, activation);
}

TORCH_LIBRARY_FRAGMENT(amp_ext, m) {
  using Key = c10::DispatchKey;
  m.impl("linear", torch::dispatch(Key::CompositeImplicitAutograd, TORCH_FN(linear_op)));
  m.impl("mlp", torch::dispatch(Key::CompositeExplicitAutograd, TORCH_FN(mlp_op)));
  m.impl("mlp", torch::dispatch(Key::Autograd, TORCH_FN(mlp_autograd)));
}

}  // namespace amp_ext
