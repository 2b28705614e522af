// Gradients of weights, added straight to where autograd would add them.
#pragma once

#include <torch/csrc/autograd/function.h>

#include "gemm.h"

namespace amp_ext {

// left @ right as the gradient of a node's input. When `in_place`, the node is being run, and it is
// provably what autograd would do with it, the product is added to the .grad of the input instead;
// then the result is undefined.
//
// That is so when the input is an FP32 leaf on which only this node depends in this backward pass;
// when the pass adds to the .grad of all leaves (backward() without inputs and create_graph, not
// autograd.grad); when no hook looks at the gradient, as data-parallel wrappers have them; and when
// the leaf's .grad is a plain FP32 tensor in the leaf's layout, apart from the operands in memory,
// and written on this node's own stream.
at::Tensor leaf_gradient(torch::autograd::Node& node, size_t input, const at::Tensor& left,
                         const at::Tensor& right, const GemmOptions& options, bool in_place);

}  // namespace amp_ext
