// A low-precision copy of one tensor, in its original's place in the autograd graph.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_to_copy.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace amp_ext {

// A copy without a history of its own. An expanded tensor is copied before it is expanded.
inline at::Tensor copy_of(const at::Tensor& tensor, at::ScalarType type) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::Tensor distinct = tensor;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.sym_stride(d) == 0 && tensor.sym_size(d) > 1) distinct = distinct.narrow(d, 0, 1);
  }
  const at::Tensor copy = at::_to_copy(distinct, type);
  return distinct.is_same(tensor) ? copy : copy.expand_symint(tensor.sym_sizes());
}

// The copy, whose gradient is passed on to the original.
inline at::Tensor with_gradient_edge(const at::Tensor& original, at::Tensor copy) {
  torch::autograd::impl::set_gradient_edge(copy, torch::autograd::impl::gradient_edge(original));
  return copy;
}

// Traced tensors have no memory, nor have zeros that autograd stands in for.
inline bool has_memory(const at::Tensor& tensor) {
  return !tensor.unsafeGetTensorImpl()->is_python_dispatch() &&
         !tensor.key_set().has(c10::DispatchKey::Functionalize) && !tensor._is_zerotensor();
}

}  // namespace amp_ext
