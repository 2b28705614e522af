// Declares the helpers of the differentiable ops.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <vector>

#include "gemm/gemm.h"

namespace amp_ext {

using NodePtr = decltype(torch::autograd::Edge::function);

// Older versions of torch hold nodes by std::shared_ptr.
template <class T>
auto make_node() {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>) {
    return std::shared_ptr<T>(new T(), [](T* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<T>();
  }
}

// Returns the type that the gradient of `tensor` has to have. It is not always the tensor's own: an
// FP16 copy may take the place of its FP32 original (autocast/weight_copies.h). The grad_dtype of a
// 16-bit leaf may be FP32. It may also be none, and then allows FP32.
at::ScalarType gradient_type(const at::Tensor& tensor);

// An addend of the result.
struct Addend {
  Addend() = default;
  explicit Addend(const at::Tensor& tensor)
      : sizes(tensor.sym_sizes().vec()), type(gradient_type(tensor)) {}

  at::Tensor gradient(const at::Tensor& grad, double factor) const;

  std::vector<c10::SymInt> sizes;
  at::ScalarType type = at::kFloat;
};

// Returns the sum of the defined tensors.
at::Tensor total(const at::Tensor& a, const at::Tensor& b);

// Throws where a forward-mode gradient would be lost: the op does not compute one.
template <class... Tensors>
void check_no_forward_gradient(const char* op, const Tensors&... tensors) {
  TORCH_CHECK_NOT_IMPLEMENTED((!torch::autograd::isFwGradDefined(tensors) && ...), op,
                              ": forward-mode differentiation is not implemented");
}

// Returns the gradient of a weight, as torch.nn.Linear stores it, from the result's gradient.
inline at::Tensor weight_gradient(const at::Tensor& grad, const at::Tensor& entered,
                                  at::ScalarType type) {
  return gemm(grad, entered, {.trans_a = true, .sum_batch = grad.dim() > 2, .out_dtype = type});
}

}  // namespace amp_ext
