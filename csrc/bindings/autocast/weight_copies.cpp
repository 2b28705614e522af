#include "autocast/weight_copies.h"

#include <ATen/core/grad_mode.h>
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

// Autograd does not track the view of what needs no gradient: a step of another thread may write it
// meanwhile, and views of no_grad refuse to be used then.
at::Tensor lowered_view(const at::Tensor& tensor, at::ScalarType type,
                        c10::function_ref<at::Tensor(const at::Tensor&)> view) {
  const at::Tensor copy = lowered(tensor, type);
  const bool is_tracked = at::GradMode::is_enabled() && !needs_no_gradient(tensor);
  const at::Tensor original = is_tracked ? view(tensor) : at::Tensor();
  if (is_tracked && copy.is_same(tensor)) return original;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::Tensor result = view(copy);
  torch::autograd::impl::set_version_counter(result, torch::autograd::impl::version_counter(copy));
  return is_tracked ? with_gradient_edge(original, std::move(result)) : result;
}

}  // namespace amp_ext
