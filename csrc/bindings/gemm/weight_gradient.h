// Gradients of weights, added straight to where autograd would add them.
#pragma once

#include <torch/csrc/autograd/function.h>

#include "gemm/gemm.h"

namespace amp_ext {

// left @ right as the gradient of a node's input. When `in_place`, the node is being run, and
// autograd would provably add it to the .grad of the input, the product is added there at once;
// then the result is undefined. Sums are rounded at other points than if the product came first.
//
// That is so when the input is a leaf on which only this node depends in this backward pass, and
// its gradient is to be FP32; when the pass adds to the .grad of all leaves (backward() without
// inputs and create_graph, not autograd.grad); when no hook, as data-parallel wrappers have them,
// nor anomaly mode looks at the gradient; and when the leaf's .grad is a plain FP32 tensor in the
// leaf's layout, apart from the operands in memory, and written on this node's own stream.
at::Tensor leaf_gradient(torch::autograd::Node& node, size_t input, const at::Tensor& left,
                         const at::Tensor& right, const GemmOptions& options, bool in_place);

}  // namespace amp_ext
