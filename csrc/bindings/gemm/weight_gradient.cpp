#include "gemm/weight_gradient.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <mutex>
#include <unordered_map>

namespace amp_ext {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

// How many edges of the backward pass that this thread runs lead to `target`. All are counted once
// a pass. The engine does not list its roots: `running` may be one.
int64_t uses_in_this_pass(const Node* target, const Node& running) {
  struct Counts {
    int pass = -1;
    std::unordered_map<const Node*, int64_t> of;
  };
  thread_local Counts counts;
  const int pass = torch::autograd::get_current_graph_task_id();
  const auto* const nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (pass < 0 || !nodes) return 0;
  if (pass != counts.pass) {
    counts = {pass, {}};
    for (const Node* node : *nodes) {
      for (const auto& edge : node->next_edges()) {
        if (dynamic_cast<const AccumulateGrad*>(edge.function.get()))
          ++counts.of[edge.function.get()];
      }
    }
  }
  int64_t uses = 0;
  if (!nodes->count(const_cast<Node*>(&running))) {
    for (const auto& edge : running.next_edges()) uses += edge.function.get() == target;
  }
  const auto found = counts.of.find(target);
  return found == counts.of.end() ? uses : uses + found->second;
}

// Gives access to a node's mutex, which is protected. AccumulateGrad holds its own while it adds:
// other threads may run backward passes at the same time.
class NodeMutex : public Node {
 public:
  static std::mutex& of(Node& node) { return node.*(&NodeMutex::mutex_); }
};

bool adds_to_all_leaves() {
  const auto* const wanted = torch::autograd::get_current_graph_task_exec_info();
  return wanted && wanted->empty() && !at::GradMode::is_enabled();
}

bool has_hooks(AccumulateGrad& node) {
  return !node.pre_hooks().empty() || !node.post_hooks().empty() ||
         !node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty() ||
         node.tensor_post_acc_grad_hooks();
}

// A tensor whose elements are in memory as they are: no subclass, no wrapper of a transform, no
// negated view, no ZeroTensor.
bool is_plain(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet functorch({c10::DispatchKey::FuncTorchBatched,
                                           c10::DispatchKey::FuncTorchGradWrapper,
                                           c10::DispatchKey::Functionalize});
  return tensor.layout() == at::kStrided && (tensor.is_cpu() || tensor.is_cuda()) &&
         !tensor.is_nested() && !tensor.is_inference() && !tensor.is_neg() &&
         !tensor._is_zerotensor() && !tensor.key_set().has_any(functorch) &&
         !tensor.unsafeGetTensorImpl()->is_python_dispatch();
}

// The leaf to whose gradient the node may add that of its input, or null.
AccumulateGrad* leaf_behind(Node& node, size_t input) {
  // Anomaly mode and post hooks would look at the gradient that the node returns.
  if (!adds_to_all_leaves() || torch::autograd::AnomalyMode::is_enabled() ||
      !node.post_hooks().empty())
    return nullptr;
  auto* const leaf = dynamic_cast<AccumulateGrad*>(node.next_edge(input).function.get());
  if (!leaf || has_hooks(*leaf) || uses_in_this_pass(leaf, node) != 1 ||
      leaf->stream() != node.stream() || !leaf->variable.defined() ||
      !leaf->variable.requires_grad() || !leaf->variable.is_leaf() || !is_plain(leaf->variable) ||
      !leaf->variable.is_contiguous()) {
    return nullptr;
  }
  return leaf;
}

bool can_add_to(const at::Tensor& grad, const at::Tensor& weight, const at::Tensor& left,
                const at::Tensor& right) {
  return grad.defined() && grad.scalar_type() == at::kFloat && is_plain(grad) &&
         !grad.requires_grad() && grad.device() == left.device() &&
         grad.sizes() == weight.sizes() && grad.strides() == weight.strides() &&
         !grad.is_alias_of(weight) && !grad.is_alias_of(left) && !grad.is_alias_of(right);
}

}  // namespace

at::Tensor leaf_gradient(Node& node, size_t input, const at::Tensor& left, const at::Tensor& right,
                         const GemmOptions& options, bool in_place) {
  in_place = in_place && options.out_dtype == at::kFloat;
  if (AccumulateGrad* const leaf = in_place ? leaf_behind(node, input) : nullptr) {
    const std::lock_guard<std::mutex> lock(NodeMutex::of(*leaf));
    const at::Tensor& grad = leaf->variable.grad();
    if (can_add_to(grad, leaf->variable, left, right)) {
      gemm_accumulate_(grad, left, right, options);
      return {};
    }
  }
  return gemm(left, right, options);
}

}  // namespace amp_ext
