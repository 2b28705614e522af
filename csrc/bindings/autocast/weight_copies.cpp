#include "autocast/weight_copies.h"

#include <c10/core/InferenceMode.h>

#include "autocast/copy.h"
#include "autocast/copy_cache.h"
#include "checks/memory.h"

namespace amp_ext {
namespace {

bool needs_no_gradient(const at::Tensor& tensor) {
  return !tensor.requires_grad() || tensor.is_inference() || c10::InferenceMode::is_enabled();
}

}  // namespace

at::Tensor lowered(const at::Tensor& tensor, at::ScalarType type) {
  if (tensor.scalar_type() == type) return tensor;
  // torch's own conversion would read memory that has been freed.
  if (has_memory(tensor)) checked_memory("autocast", "an operand", tensor, Access::read);
  if (needs_no_gradient(tensor)) return tensor.to(type);
  if (at::Tensor kept = kept_copy(tensor, type); kept.defined()) return kept;
  return with_gradient_edge(tensor, copy_of(tensor, type));
}

at::Tensor lowered_matrix(const at::Tensor& weight, at::ScalarType type) {
  if (weight.scalar_type() != type && !needs_no_gradient(weight)) {
    if (at::Tensor kept = kept_matrix(weight, type); kept.defined()) return kept;
  }
  return lowered(as_matrix(weight), type);
}

}  // namespace amp_ext
