// Computes linear and gated_mlp: products with weights as torch.nn.Linear stores them.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/mul.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <array>
#include <mutex>

#include "gemm/autograd.h"
#include "op.h"

namespace amp_ext {
namespace {

using OptionalTensor = std::optional<at::Tensor>;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

constexpr auto kLinear = "amp_ext::linear";
constexpr auto kGatedMlp = "amp_ext::gated_mlp";

struct Layer {
  const char* weight_name;
  const at::Tensor& weight;
  const char* bias_name;
  const OptionalTensor& bias;
};

// The layers of gated_mlp, by their indices.
enum : size_t { kGate, kUp, kDown, kLayers };
using Layers = std::array<Layer, kLayers>;

GemmOptions options_of(const OptionalTensor& bias, std::string_view activation = "none") {
  return {.trans_b = true, .bias = bias, .activation = activation};
}

// Checks a layer with the input `entering`, along one of its dimensions.
void check_layer(const char* op, const char* entering_name, const at::Tensor& entering, int64_t dim,
                 const Layer& layer) {
  const auto& [weight_name, weight, bias_name, bias] = layer;
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

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                  std::string_view activation) {
  check_operand(kLinear, "x", x, x.device());
  activation_of(kLinear, activation);
  check_layer(kLinear, "x", x, -1, {"weight", weight, "bias", bias});
  if (x.dim() == 1) return linear(x.unsqueeze(0), weight, bias, activation).squeeze(0);
  return gemm(x, weight, options_of(bias, activation));
}

void check_layers(const at::Tensor& x, const Layers& layers, std::string_view activation) {
  const auto& [gate, up, down] = layers;
  check_operand(kGatedMlp, "x", x, x.device());
  activation_of(kGatedMlp, activation);
  check_layer(kGatedMlp, "x", x, -1, gate);
  check_layer(kGatedMlp, "x", x, -1, up);
  TORCH_CHECK(gate.weight.sym_size(0) == up.weight.sym_size(0), kGatedMlp, ": ", gate.weight_name,
              " must have ", up.weight.sym_size(0), " rows, as ", up.weight_name,
              " has, got shape ", gate.weight.sym_sizes());
  check_layer(kGatedMlp, up.weight_name, up.weight, 0, down);
}

at::Tensor compute(const at::Tensor& x, const Layers& layers, std::string_view activation) {
  check_layers(x, layers, activation);
  if (x.dim() == 1) return compute(x.unsqueeze(0), layers, activation).squeeze(0);
  const auto& [gate, up, down] = layers;
  const at::Tensor gates = gemm(x, gate.weight, options_of(gate.bias, activation));
  const at::Tensor hidden = at::mul(gates, gemm(x, up.weight, options_of(up.bias)));
  return gemm(hidden, down.weight, options_of(down.bias));
}

// Computes the gradients of gated_mlp. Its first output is the point of the activation's
// derivative: the pre-activation if the activation is curved, else the activated gate. Its second
// output is the result of the layer `up`, its last the op's result. Only backward passes see the
// outputs before the last, as in GemmBackward. The hidden layer is computed again.
struct GatedMlpBackward final : torch::autograd::Node {
  struct Saved {
    SavedVariable weight;
    at::ScalarType type = at::kFloat;
    Addend bias;
  };

  // The inputs, in the order of the arguments.
  static constexpr size_t kX = 0;
  static size_t weight_of(size_t layer) { return 1 + 2 * layer; }
  static size_t bias_of(size_t layer) { return 2 + 2 * layer; }

  std::string name() const override { return "GatedMlpBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    reset_saved();
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto wanted = [&](size_t input) { return task_should_compute_output(input); };
    const auto wants_result_of = [&](size_t layer) {
      return wanted(kX) || wanted(weight_of(layer)) || wanted(bias_of(layer));
    };
    const bool wants_gate = wants_result_of(kGate), wants_up = wants_result_of(kUp);
    const at::Tensor& grad = grads.back();
    const bool wants_down = grad.defined() && wanted(weight_of(kDown));
    const bool wants_hidden = grad.defined() && (wants_gate || wants_up);

    // Unpack all before a gradient is written, and each once: checkpoints allow no more.
    at::Tensor at_point, gated, entered, to_result;
    std::array<at::Tensor, 2> to_inner;
    if (wants_down || wants_hidden) {
      at_point = point.unpack(getptr());
      gated = up.unpack(getptr());
    }
    if (wants_hidden) to_result = layers[kDown].weight.unpack();
    if (wanted(weight_of(kGate)) || wanted(weight_of(kUp))) entered = x.unpack();
    for (size_t i = kGate; i < kDown && wanted(kX); ++i) to_inner[i] = layers[i].weight.unpack();
    // Free tensors after their last use, as separate nodes for the layers would.
    const bool is_running = torch::autograd::get_current_node().get() == this;
    if (is_running && !torch::autograd::get_current_graph_task_keep_graph()) reset_saved();

    variable_list results(1 + 2 * kLayers);
    if (grad.defined() && wanted(bias_of(kDown)))
      results[bias_of(kDown)] = layers[kDown].bias.gradient(grad, 1);

    // The gradients of the pre-activation, and of the result of `up`.
    std::array<at::Tensor, 2> inner{grads[kGate], grads[kUp]};
    at::Tensor factor;
    if (wants_down || (wants_up && grad.defined())) factor = activated(at_point, activation);
    if (wants_down) {
      results[weight_of(kDown)] = weight_gradient(grad, at::mul(factor, gated), layers[kDown].type);
    }
    if (wants_hidden) {
      const at::Tensor grad_hidden = gemm(grad, to_result, {.out_dtype = hidden_type});
      if (wants_gate) {
        const at::Tensor outer = at::mul(grad_hidden, gated);
        inner[kGate] = total(
            activation_gradient(outer, at_point.to(outer.scalar_type()), activation), inner[kGate]);
      }
      if (wants_up) inner[kUp] = total(at::mul(grad_hidden, factor), inner[kUp]);
    }

    for (at::Tensor* const used : {&at_point, &gated, &to_result, &factor}) used->reset();
    grads.clear();
    for (size_t i = kGate; i < kDown; ++i) {
      if (!inner[i].defined()) continue;
      if (wanted(bias_of(i))) results[bias_of(i)] = layers[i].bias.gradient(inner[i], 1);
      if (wanted(weight_of(i)))
        results[weight_of(i)] = weight_gradient(inner[i], entered, layers[i].type);
      if (wanted(kX)) {
        GemmOptions options{.out_dtype = x_type};
        if (results[kX].defined()) options.c = results[kX];
        results[kX] = gemm(inner[i], to_inner[i], options);
      }
      inner[i].reset();
    }
    return results;
  }

  Activation activation = Activation::none;
  at::ScalarType x_type = at::kFloat, hidden_type = at::kFloat;
  SavedVariable x, point, up;
  std::array<Saved, kLayers> layers;

 private:
  // The caller holds mutex_.
  void reset_saved() {
    for (SavedVariable* saved : {&x, &point, &up}) saved->reset_data();
    for (Saved& layer : layers) layer.weight.reset_data();
  }
};

// Returns the result with a history. Each tensor is saved before its product: a checkpoint may not
// need to compute the product again.
at::Tensor recorded(const at::Tensor& x, const Layers& layers, const variable_list& inputs,
                    std::string_view activation) {
  using Backward = GatedMlpBackward;
  const auto node = make_node<Backward>();
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  node->activation = activation_of(kGatedMlp, activation);
  node->x_type = gradient_type(x);
  bool wants_hidden = node->should_compute_output(Backward::kX), wants_weight = false;
  for (size_t i = 0; i < kLayers; ++i) {
    const Layer& layer = layers[i];
    node->layers[i].type = gradient_type(layer.weight);
    if (layer.bias && layer.bias->requires_grad()) node->layers[i].bias = Addend(*layer.bias);
    if (i == kDown) continue;
    const bool wants = node->should_compute_output(Backward::weight_of(i));
    wants_weight |= wants;
    wants_hidden |= wants || node->should_compute_output(Backward::bias_of(i));
    if (node->should_compute_output(Backward::kX))
      node->layers[i].weight = SavedVariable(layer.weight, false);
  }
  const bool needs_inner = wants_hidden || node->should_compute_output(Backward::weight_of(kDown));
  if (wants_weight) node->x = SavedVariable(x, false);
  if (wants_hidden) node->layers[kDown].weight = SavedVariable(layers[kDown].weight, false);

  const auto below_autograd = [](const auto& function) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return function();
  };
  const auto keep = [&](const at::Tensor& output, SavedVariable& saved) {
    torch::autograd::set_history(output, node);
    if (needs_inner) saved = SavedVariable(output, /*is_output=*/true);
  };
  at::Tensor gates, point;
  below_autograd([&] {
    const GemmOptions options = options_of(layers[kGate].bias, activation);
    if (is_curved(node->activation) && needs_inner) {
      std::tie(gates, point) = gemm_with_aux(x, layers[kGate].weight, options);
    } else {
      gates = point = gemm(x, layers[kGate].weight, options);
    }
  });
  keep(point, node->point);
  const at::Tensor up =
      below_autograd([&] { return gemm(x, layers[kUp].weight, options_of(layers[kUp].bias)); });
  keep(up, node->up);
  const at::Tensor hidden = below_autograd([&] { return at::mul(gates, up); });
  node->hidden_type = hidden.scalar_type();
  const at::Tensor out = below_autograd(
      [&] { return gemm(hidden, layers[kDown].weight, options_of(layers[kDown].bias)); });
  torch::autograd::set_history(out, node);
  return out;
}

at::Tensor differentiable(const at::Tensor& x, const Layers& layers, std::string_view activation) {
  check_layers(x, layers, activation);
  variable_list inputs{x};
  for (const Layer& layer : layers) {
    inputs.push_back(layer.weight);
    inputs.push_back(layer.bias.value_or(at::Tensor()));
  }
  for (const at::Tensor& input : inputs) check_no_forward_gradient(kGatedMlp, input);
  if (x.dim() == 1) return differentiable(x.unsqueeze(0), layers, activation).squeeze(0);
  if (torch::autograd::compute_requires_grad(inputs))
    return recorded(x, layers, inputs, activation);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return compute(x, layers, activation);
}

// Calls a function of layers with the arguments of gated_mlp.
template <auto kFunction>
at::Tensor gated_mlp_op(const at::Tensor& x, const at::Tensor& gate_weight,
                        const OptionalTensor& gate_bias, const at::Tensor& up_weight,
                        const OptionalTensor& up_bias, const at::Tensor& down_weight,
                        const OptionalTensor& down_bias, std::string_view activation) {
  const Layers layers{Layer{"gate_weight", gate_weight, "gate_bias", gate_bias},
                      Layer{"up_weight", up_weight, "up_bias", up_bias},
                      Layer{"down_weight", down_weight, "down_bias", down_bias}};
  return kFunction(x, layers, activation);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(amp_ext, m) {
  using Key = c10::DispatchKey;
  m.impl("linear", torch::dispatch(Key::CompositeImplicitAutograd, TORCH_FN(linear)));
  m.impl("gated_mlp",
         torch::dispatch(Key::CompositeExplicitAutograd, TORCH_FN(gated_mlp_op<compute>)));
  m.impl("gated_mlp", torch::dispatch(Key::Autograd, TORCH_FN(gated_mlp_op<differentiable>)));
}

}  // namespace amp_ext
