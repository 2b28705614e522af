// gated_mlp: two layers of one input, of which the activated one gates the other, and a third layer
// of their product.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/mul.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <mutex>

#include "gemm/autograd.h"
#include "gemm/linear.h"
#include "op.h"

namespace amp_ext {
namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

constexpr auto kGatedMlp = "amp_ext::gated_mlp";

void check_gated_mlp(const at::Tensor& x, const at::Tensor& gate_weight,
                     const OptionalTensor& gate_bias, const at::Tensor& up_weight,
                     const OptionalTensor& up_bias, const at::Tensor& down_weight,
                     const OptionalTensor& down_bias, std::string_view activation) {
  check_operand(kGatedMlp, "x", x, x.device());
  activation_of(kGatedMlp, activation);
  check_layer(kGatedMlp, "x", x, -1, "gate_weight", gate_weight, "gate_bias", gate_bias);
  check_layer(kGatedMlp, "x", x, -1, "up_weight", up_weight, "up_bias", up_bias);
  TORCH_CHECK(gate_weight.sym_size(0) == up_weight.sym_size(0), kGatedMlp,
              ": gate_weight must have ", up_weight.sym_size(0),
              " rows, as up_weight has, got shape ", gate_weight.sym_sizes());
  check_layer(kGatedMlp, "up_weight", up_weight, 0, "down_weight", down_weight, "down_bias",
              down_bias);
}

// Its outputs are what the activation is applied to (its result where that is not curved), what it
// gates, and the result: backward passes see the former, as those of GemmBackward. The hidden
// layer, their product, is computed again.
struct GatedMlpBackward final : Node {
  enum Input { kX, kGateWeight, kGateBias, kUpWeight, kUpBias, kDownWeight, kDownBias, kInputs };

  std::string name() const override { return "GatedMlpBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable* saved : {&x, &gate_weight, &up_weight, &down_weight, &gate, &up})
      saved->reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    variable_list results(kInputs);
    at::Tensor grad_gate = grads[0], grad_up = grads[1];
    const at::Tensor& grad = grads[2];
    const auto wanted = [&](Input input) { return task_should_compute_output(input); };
    const bool wants_gate = wanted(kX) || wanted(kGateWeight) || wanted(kGateBias);
    const bool wants_up = wanted(kX) || wanted(kUpWeight) || wanted(kUpBias);
    const bool wants_hidden = wants_gate || wants_up;

    // All at once, before a gradient is written, and each once, as checkpoints let it be.
    at::Tensor factor, gated, entered, to_gate, to_up, to_result;
    if (grad.defined() && (wanted(kDownWeight) || wants_hidden)) {
      factor = gate.unpack(getptr());
      gated = up.unpack(getptr());
    }
    if (grad.defined() && wants_hidden) to_result = down_weight.unpack();
    if (wanted(kGateWeight) || wanted(kUpWeight)) entered = x.unpack();
    if (wanted(kX)) {
      to_gate = gate_weight.unpack();
      to_up = up_weight.unpack();
    }

    if (grad.defined()) {
      if (wanted(kDownBias)) results[kDownBias] = down_bias.gradient(grad, 1);
      at::Tensor activated_factor;
      if (wanted(kDownWeight) || wants_up) activated_factor = activated(factor, activation);
      if (wanted(kDownWeight)) {
        results[kDownWeight] = weight_gradient(grad, at::mul(activated_factor, gated), down_type);
      }
      if (wants_hidden) {
        const at::Tensor grad_hidden = gemm(grad, to_result, {.out_dtype = hidden_type});
        if (wants_gate) {
          const at::Tensor inner = at::mul(grad_hidden, gated);
          const at::Tensor point = factor.to(inner.scalar_type());
          grad_gate = total(activation_gradient(inner, point, activation), grad_gate);
        }
        if (wants_up) grad_up = total(at::mul(grad_hidden, activated_factor), grad_up);
      }
    }
    if (wants_gate && grad_gate.defined()) {
      if (wanted(kGateBias)) results[kGateBias] = gate_bias.gradient(grad_gate, 1);
      if (wanted(kGateWeight))
        results[kGateWeight] = weight_gradient(grad_gate, entered, gate_type);
      if (wanted(kX)) results[kX] = gemm(grad_gate, to_gate, {.out_dtype = x_type});
    }
    if (wants_up && grad_up.defined()) {
      if (wanted(kUpBias)) results[kUpBias] = up_bias.gradient(grad_up, 1);
      if (wanted(kUpWeight)) results[kUpWeight] = weight_gradient(grad_up, entered, up_type);
      if (wanted(kX)) {
        GemmOptions options{.out_dtype = x_type};
        if (results[kX].defined()) options.c = results[kX];
        results[kX] = gemm(grad_up, to_up, options);
      }
    }
    return results;
  }

  SavedVariable x, gate_weight, up_weight, down_weight, gate, up;
  Activation activation;
  at::ScalarType x_type, gate_type, up_type, down_type, hidden_type;
  Addend gate_bias, up_bias, down_bias;
};

at::Tensor gated_mlp_op(const at::Tensor& x, const at::Tensor& gate_weight,
                        const OptionalTensor& gate_bias, const at::Tensor& up_weight,
                        const OptionalTensor& up_bias, const at::Tensor& down_weight,
                        const OptionalTensor& down_bias, std::string_view activation) {
  check_gated_mlp(x, gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias,
                  activation);
  const at::Tensor rows = x.dim() == 1 ? x.unsqueeze(0) : x;
  const at::Tensor factor = gemm(rows, gate_weight, layer(gate_bias, activation));
  const at::Tensor hidden = at::mul(factor, gemm(rows, up_weight, layer(up_bias)));
  const at::Tensor out = gemm(hidden, down_weight, layer(down_bias));
  return x.dim() == 1 ? out.squeeze(0) : out;
}

at::Tensor gated_mlp_autograd(const at::Tensor& x, const at::Tensor& gate_weight,
                              const OptionalTensor& gate_bias, const at::Tensor& up_weight,
                              const OptionalTensor& up_bias, const at::Tensor& down_weight,
                              const OptionalTensor& down_bias, std::string_view activation) {
  check_gated_mlp(x, gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias,
                  activation);
  check_no_forward_gradient(kGatedMlp, x, gate_weight, gate_bias, up_weight, up_bias, down_weight,
                            down_bias);
  if (x.dim() == 1) {
    return gated_mlp_autograd(x.unsqueeze(0), gate_weight, gate_bias, up_weight, up_bias,
                              down_weight, down_bias, activation)
        .squeeze(0);
  }
  if (!torch::autograd::compute_requires_grad(x, gate_weight, gate_bias, up_weight, up_bias,
                                              down_weight, down_bias)) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return gated_mlp_op(x, gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias,
                        activation);
  }
  using Backward = GatedMlpBackward;
  const auto node = make_node<Backward>();
  node->set_next_edges(torch::autograd::collect_next_edges(x, gate_weight, gate_bias, up_weight,
                                                           up_bias, down_weight, down_bias));
  const auto wants = [&](Backward::Input input) { return node->should_compute_output(input); };
  const bool wants_inner = wants(Backward::kX) || wants(Backward::kGateWeight) ||
                           wants(Backward::kGateBias) || wants(Backward::kUpWeight) ||
                           wants(Backward::kUpBias);
  const bool wants_hidden = wants_inner || wants(Backward::kDownWeight);
  node->activation = activation_of(kGatedMlp, activation);
  node->x_type = gradient_type(x);
  node->gate_type = gradient_type(gate_weight);
  node->up_type = gradient_type(up_weight);
  node->down_type = gradient_type(down_weight);
  if (gate_bias && gate_bias->requires_grad()) node->gate_bias = Addend(*gate_bias);
  if (up_bias && up_bias->requires_grad()) node->up_bias = Addend(*up_bias);
  if (down_bias && down_bias->requires_grad()) node->down_bias = Addend(*down_bias);
  // Each before the product that it enters, which a checkpoint may not need again.
  if (wants(Backward::kGateWeight) || wants(Backward::kUpWeight)) node->x = SavedVariable(x, false);
  if (wants(Backward::kX)) {
    node->gate_weight = SavedVariable(gate_weight, false);
    node->up_weight = SavedVariable(up_weight, false);
  }
  if (wants_inner) node->down_weight = SavedVariable(down_weight, false);
  const auto save = [&](SavedVariable& saved, const at::Tensor& output) {
    torch::autograd::set_history(output, node);
    if (wants_hidden) saved = SavedVariable(output, /*is_output=*/true);
  };
  at::Tensor factor, gate, up, out;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (wants_hidden && is_curved(node->activation)) {
      std::tie(factor, gate) = gemm_with_aux(x, gate_weight, layer(gate_bias, activation));
    } else {
      factor = gate = gemm(x, gate_weight, layer(gate_bias, activation));
    }
  }
  save(node->gate, gate);
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    up = gemm(x, up_weight, layer(up_bias));
  }
  save(node->up, up);
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const at::Tensor hidden = at::mul(factor, up);
    node->hidden_type = hidden.scalar_type();
    out = gemm(hidden, down_weight, layer(down_bias));
  }
  torch::autograd::set_history(out, node);
  return out;
}

}  // namespace

at::Tensor gated_mlp(const at::Tensor& x, const at::Tensor& gate_weight,
                     const OptionalTensor& gate_bias, const at::Tensor& up_weight,
                     const OptionalTensor& up_bias, const at::Tensor& down_weight,
                     const OptionalTensor& down_bias, std::string_view activation) {
  static const auto op = typed_op<decltype(gated_mlp_op)>(kGatedMlp);
  return op.call(x, gate_weight, gate_bias, up_weight, up_bias, down_weight, down_bias, activation);
}

TORCH_LIBRARY_FRAGMENT(amp_ext, m) {
  using Key = c10::DispatchKey;
  m.impl("gated_mlp", torch::dispatch(Key::CompositeExplicitAutograd, TORCH_FN(gated_mlp_op)));
  m.impl("gated_mlp", torch::dispatch(Key::Autograd, TORCH_FN(gated_mlp_autograd)));
}

}  // namespace amp_ext
