// Computes linear, mlp and gated_mlp: products with weights as torch.nn.Linear stores them.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/mul.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <array>
#include <mutex>
#include <span>

#include "gemm/autograd.h"
#include "op.h"

namespace amp_ext {
namespace {

using OptionalTensor = std::optional<at::Tensor>;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

constexpr auto kLinear = "amp_ext::linear";
constexpr auto kMlp = "amp_ext::mlp";
constexpr auto kGatedMlp = "amp_ext::gated_mlp";

struct Layer {
  const char* weight_name;
  const at::Tensor& weight;
  const char* bias_name;
  const OptionalTensor& bias;
};

// The layers of one op. The activated result of the first layer enters the last. If there are three
// layers, it is multiplied by the result of the second layer before.
using Layers = std::span<const Layer>;

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

void check_layers(const char* op, const at::Tensor& x, Layers layers, std::string_view activation) {
  check_operand(op, "x", x, x.device());
  activation_of(op, activation);
  check_layer(op, "x", x, -1, layers[0]);
  if (layers.size() == 1) return;
  const Layer& inner = layers[layers.size() - 2];
  if (layers.size() == 3) {
    check_layer(op, "x", x, -1, inner);
    TORCH_CHECK(layers[0].weight.sym_size(0) == inner.weight.sym_size(0), op, ": ",
                layers[0].weight_name, " must have ", inner.weight.sym_size(0), " rows, as ",
                inner.weight_name, " has, got shape ", layers[0].weight.sym_sizes());
  }
  check_layer(op, inner.weight_name, inner.weight, 0, layers.back());
}

at::Tensor compute(const char* op, const at::Tensor& x, Layers layers,
                   std::string_view activation) {
  check_layers(op, x, layers, activation);
  if (x.dim() == 1) return compute(op, x.unsqueeze(0), layers, activation).squeeze(0);
  at::Tensor result = gemm(x, layers[0].weight, options_of(layers[0].bias, activation));
  if (layers.size() == 1) return result;
  if (layers.size() == 3) {
    result = at::mul(result, gemm(x, layers[1].weight, options_of(layers[1].bias)));
  }
  return gemm(result, layers.back().weight, options_of(layers.back().bias));
}

// The backward pass of two or three layers. Its first output is the point of the activation's
// derivative: the pre-activation if the activation is curved, else the activated result. Its next
// output gates the hidden layer. Without a gate, it is the hidden layer, unless the point is. The
// last output is the result. Only backward passes see the outputs before it, as in GemmBackward. A
// gated hidden layer is computed again.
struct LayersBackward final : torch::autograd::Node {
  struct Saved {
    SavedVariable weight;
    at::ScalarType type = at::kFloat;
    Addend bias;
  };

  // The inputs, in the order of the arguments.
  static constexpr size_t kX = 0;
  static size_t weight_of(size_t layer) { return 1 + 2 * layer; }
  static size_t bias_of(size_t layer) { return 2 + 2 * layer; }

  std::string name() const override { return is_gated ? "GatedMlpBackward" : "MlpBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    reset_saved();
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const size_t last = is_gated ? 2 : 1;
    const auto wanted = [&](size_t input) { return task_should_compute_output(input); };
    const auto wants_result_of = [&](size_t layer) {
      return wanted(kX) || wanted(weight_of(layer)) || wanted(bias_of(layer));
    };
    const bool wants_first = wants_result_of(0), wants_up = is_gated && wants_result_of(1);
    const bool wants_hidden = wants_first || wants_up;
    const at::Tensor& grad = grads.back();
    const bool wants_last = grad.defined() && wanted(weight_of(last));

    // Unpack all before a gradient is written, and each once: checkpoints allow no more.
    at::Tensor at_point, other, entered, to_result;
    std::array<at::Tensor, 2> to_inner;
    if (wants_last || (wants_hidden && (grad.defined() || !is_gated))) {
      at_point = point.unpack(getptr());
      if (is_gated || wants_last) other = second.unpack(getptr());
    }
    if (grad.defined() && wants_hidden) to_result = layers[last].weight.unpack();
    if (wanted(weight_of(0)) || (is_gated && wanted(weight_of(1)))) entered = x.unpack();
    for (size_t i = 0; i < last && wanted(kX); ++i) to_inner[i] = layers[i].weight.unpack();
    // Free tensors after their last use, as separate nodes for the layers would.
    const bool is_running = torch::autograd::get_current_node().get() == this;
    if (is_running && !torch::autograd::get_current_graph_task_keep_graph()) reset_saved();

    variable_list results(1 + 2 * (last + 1));
    if (grad.defined() && wanted(bias_of(last)))
      results[bias_of(last)] = layers[last].bias.gradient(grad, 1);

    // The gradients of the pre-activation, and of the gated tensor.
    std::array<at::Tensor, 2> inner;
    at::Tensor column_sums;
    if (is_gated) {
      inner = {grads[0], grads[1]};
      at::Tensor factor;
      if (wants_last || (wants_up && grad.defined())) factor = activated(at_point, activation);
      if (wants_last) {
        results[weight_of(last)] = weight_gradient(grad, at::mul(factor, other), layers[last].type);
      }
      if (grad.defined() && wants_hidden) {
        const at::Tensor grad_hidden = gemm(grad, to_result, {.out_dtype = hidden_type});
        if (wants_first) {
          const at::Tensor outer = at::mul(grad_hidden, other);
          inner[0] = total(activation_gradient(outer, at_point.to(outer.scalar_type()), activation),
                           inner[0]);
        }
        if (wants_up) inner[1] = total(at::mul(grad_hidden, factor), inner[1]);
      }
    } else {
      const bool is_point_hidden = grads.size() == 2;
      if (wants_last) {
        results[weight_of(last)] =
            weight_gradient(grad, is_point_hidden ? at_point : other, layers[last].type);
      }
      other.reset();
      if (wants_hidden) {
        const at::Tensor grad_hidden = grads[is_point_hidden ? 0 : 1];
        const at::Tensor grad_point = is_point_hidden ? at::Tensor() : grads[0];
        const bool only_result = grad.defined() && !grad_hidden.defined() && !grad_point.defined();
        GemmOptions options{.out_dtype = hidden_type};
        if (only_result && !at::GradMode::is_enabled()) {
          options.activation = activation_name(activation);
          std::tie(inner[0], column_sums) =
              gemm_times_derivative(grad, to_result, at_point, options);
        } else {
          if (grad.defined()) inner[0] = gemm(grad, to_result, options);
          inner[0] = total(inner[0], grad_hidden);
          if (inner[0].defined()) inner[0] = activation_gradient(inner[0], at_point, activation);
          inner[0] = total(inner[0], grad_point);
        }
      }
    }

    for (at::Tensor* const used : {&at_point, &other, &to_result}) used->reset();
    grads.clear();
    for (size_t i = 0; i < last; ++i) {
      if (!inner[i].defined()) continue;
      if (wanted(bias_of(i))) {
        results[bias_of(i)] = column_sums.defined() ? column_sums.to(layers[i].bias.type)
                                                    : layers[i].bias.gradient(inner[i], 1);
      }
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

  bool is_gated = false;
  Activation activation = Activation::none;
  at::ScalarType x_type = at::kFloat, hidden_type = at::kFloat;
  SavedVariable x, point, second;
  std::array<Saved, 3> layers;

 private:
  // The caller holds mutex_.
  void reset_saved() {
    for (SavedVariable* saved : {&x, &point, &second}) saved->reset_data();
    for (Saved& layer : layers) layer.weight.reset_data();
  }
};

// Returns the result with a history. Each tensor is saved before its product: a checkpoint may not
// need to compute the product again.
at::Tensor recorded(const at::Tensor& x, Layers layers, const variable_list& inputs,
                    std::string_view activation) {
  using Backward = LayersBackward;
  const auto node = make_node<Backward>();
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  const size_t last = layers.size() - 1;
  node->is_gated = last == 2;
  node->activation = activation_of(kMlp, activation);
  node->x_type = gradient_type(x);
  bool wants_hidden = node->should_compute_output(Backward::kX), wants_weight = false;
  for (size_t i = 0; i <= last; ++i) {
    const Layer& layer = layers[i];
    node->layers[i].type = gradient_type(layer.weight);
    if (layer.bias && layer.bias->requires_grad()) node->layers[i].bias = Addend(*layer.bias);
    if (i == last) continue;
    const bool wants = node->should_compute_output(Backward::weight_of(i));
    wants_weight |= wants;
    wants_hidden |= wants || node->should_compute_output(Backward::bias_of(i));
    if (node->should_compute_output(Backward::kX))
      node->layers[i].weight = SavedVariable(layer.weight, false);
  }
  const bool wants_last = node->should_compute_output(Backward::weight_of(last));
  if (wants_weight) node->x = SavedVariable(x, false);
  if (wants_hidden) node->layers[last].weight = SavedVariable(layers[last].weight, false);

  const auto below_autograd = [](const auto& function) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return function();
  };
  const auto keep = [&](const at::Tensor& output, SavedVariable& saved, bool is_needed) {
    torch::autograd::set_history(output, node);
    if (is_needed) saved = SavedVariable(output, /*is_output=*/true);
  };
  const bool needs_argument =
      is_curved(node->activation) && (wants_hidden || (node->is_gated && wants_last));
  at::Tensor hidden, point;
  below_autograd([&] {
    const GemmOptions options = options_of(layers[0].bias, activation);
    if (needs_argument) {
      std::tie(hidden, point) = gemm_with_aux(x, layers[0].weight, options);
    } else {
      hidden = point = gemm(x, layers[0].weight, options);
    }
  });
  keep(point, node->point, wants_hidden || wants_last);
  if (node->is_gated) {
    const at::Tensor up =
        below_autograd([&] { return gemm(x, layers[1].weight, options_of(layers[1].bias)); });
    keep(up, node->second, wants_hidden || wants_last);
    hidden = below_autograd([&] { return at::mul(hidden, up); });
  } else if (needs_argument) {
    keep(hidden, node->second, wants_last);
  }
  node->hidden_type = hidden.scalar_type();
  const at::Tensor out = below_autograd(
      [&] { return gemm(hidden, layers[last].weight, options_of(layers[last].bias)); });
  torch::autograd::set_history(out, node);
  return out;
}

at::Tensor differentiable(const char* op, const at::Tensor& x, Layers layers,
                          std::string_view activation) {
  check_layers(op, x, layers, activation);
  variable_list inputs{x};
  for (const Layer& layer : layers) {
    inputs.push_back(layer.weight);
    inputs.push_back(layer.bias.value_or(at::Tensor()));
  }
  for (const at::Tensor& input : inputs) check_no_forward_gradient(op, input);
  if (x.dim() == 1) return differentiable(op, x.unsqueeze(0), layers, activation).squeeze(0);
  if (torch::autograd::compute_requires_grad(inputs))
    return recorded(x, layers, inputs, activation);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return compute(op, x, layers, activation);
}

using Function = at::Tensor(const char*, const at::Tensor&, Layers, std::string_view);

// A function of layers in the signature of its op: linear ...
template <Function* kFunction>
at::Tensor linear_op(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                     std::string_view activation) {
  const std::array layers{Layer{"weight", weight, "bias", bias}};
  return kFunction(kLinear, x, layers, activation);
}

// ... mlp ...
template <Function* kFunction>
at::Tensor mlp_op(const at::Tensor& x, const at::Tensor& weight1, const OptionalTensor& bias1,
                  const at::Tensor& weight2, const OptionalTensor& bias2,
                  std::string_view activation) {
  const std::array layers{Layer{"weight1", weight1, "bias1", bias1},
                          Layer{"weight2", weight2, "bias2", bias2}};
  return kFunction(kMlp, x, layers, activation);
}

// ... and gated_mlp.
template <Function* kFunction>
at::Tensor gated_mlp_op(const at::Tensor& x, const at::Tensor& gate_weight,
                        const OptionalTensor& gate_bias, const at::Tensor& up_weight,
                        const OptionalTensor& up_bias, const at::Tensor& down_weight,
                        const OptionalTensor& down_bias, std::string_view activation) {
  const std::array layers{Layer{"gate_weight", gate_weight, "gate_bias", gate_bias},
                          Layer{"up_weight", up_weight, "up_bias", up_bias},
                          Layer{"down_weight", down_weight, "down_bias", down_bias}};
  return kFunction(kGatedMlp, x, layers, activation);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(amp_ext, m) {
  using Key = c10::DispatchKey;
  m.impl("linear", torch::dispatch(Key::CompositeImplicitAutograd, TORCH_FN(linear_op<compute>)));
  m.impl("mlp", torch::dispatch(Key::CompositeExplicitAutograd, TORCH_FN(mlp_op<compute>)));
  m.impl("mlp", torch::dispatch(Key::Autograd, TORCH_FN(mlp_op<differentiable>)));
  m.impl("gated_mlp",
         torch::dispatch(Key::CompositeExplicitAutograd, TORCH_FN(gated_mlp_op<compute>)));
  m.impl("gated_mlp", torch::dispatch(Key::Autograd, TORCH_FN(gated_mlp_op<differentiable>)));
}

}  // namespace amp_ext
