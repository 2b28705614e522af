#include "lowered.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_to_copy.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/variable.h>

#include <map>
#include <mutex>
#include <utility>

#include "memory.h"

namespace amp_ext {
namespace {

// A copy without a history of its own. An expanded tensor is copied before it is expanded.
at::Tensor copy_of(const at::Tensor& tensor, at::ScalarType type) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::Tensor distinct = tensor;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.sym_stride(d) == 0 && tensor.sym_size(d) > 1) distinct = distinct.narrow(d, 0, 1);
  }
  const at::Tensor copy = at::_to_copy(distinct, type);
  return distinct.is_same(tensor) ? copy : copy.expand_symint(tensor.sym_sizes());
}

at::Tensor standing_for(const at::Tensor& original, at::Tensor copy) {
  torch::autograd::impl::set_gradient_edge(copy, torch::autograd::impl::gradient_edge(original));
  return copy;
}

at::Tensor as_matrix(const at::Tensor& weight) {
  return weight.view_symint({weight.sym_size(0), weight.sym_size(1)});
}

// A copy holds the node that accumulates its original's gradient, and that holds the original: an
// address that is a key here cannot become another tensor's.
class Copies final : public c10::BackendMeta {
 public:
  at::Tensor of(const at::Tensor& leaf, at::ScalarType type) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return entry(leaf, type).copy;
  }

  at::Tensor matrix_of(const at::Tensor& leaf, at::ScalarType type) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Entry& entry = this->entry(leaf, type);
    if (!entry.matrix.defined()) {
      const at::AutoGradMode with_history(true);
      const at::Tensor original = as_matrix(leaf);
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      entry.matrix = standing_for(original, as_matrix(entry.copy));
    }
    return entry.matrix;
  }

 private:
  struct Entry {
    int64_t version;
    at::Tensor copy;
    at::Tensor matrix;
  };

  Entry& entry(const at::Tensor& leaf, at::ScalarType type) {
    Entry& entry = entries_[{leaf.unsafeGetTensorImpl(), type}];
    if (!entry.copy.defined() || entry.version != leaf._version()) {
      entry = {leaf._version(), standing_for(leaf, copy_of(leaf, type)), {}};
    }
    return entry;
  }

  std::mutex mutex_;
  std::map<std::pair<at::TensorImpl*, at::ScalarType>, Entry> entries_;
};

// The copies live inside torch's cache, so that they go when it is cleared, which nobody would
// tell: as the data of the cached copy of a tensor made for that purpose. Another thread may clear
// it at any time. Null when torch caches nothing.
c10::intrusive_ptr<Copies> copies() {
  if (!at::autocast::is_autocast_cache_enabled()) return {};
  // No mode and no tracer shall see this.
  const c10::impl::ForceDispatchKeyGuard plain(c10::default_included_set,
                                               c10::autocast_dispatch_keyset);
  static const at::Tensor* const anchor =
      new at::Tensor(at::empty({0}, at::kFloat).requires_grad_());
  const at::Tensor cached =
      at::autocast::cached_cast(at::autocast::get_autocast_dtype(at::kCPU), *anchor, at::kCPU);
  if (cached.is_same(*anchor)) return {};
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  c10::TensorImpl* const impl = cached.unsafeGetTensorImpl();
  if (!impl->get_backend_meta()) impl->set_backend_meta(c10::make_intrusive<Copies>());
  return c10::intrusive_ptr<Copies>::reclaim_copy(static_cast<Copies*>(impl->get_backend_meta()));
}

// The cache that has the copies of `leaf`; null when it is not to be kept.
c10::intrusive_ptr<Copies> copies_for(const at::Tensor& leaf) {
  const bool kept = leaf.scalar_type() == at::kFloat && leaf.is_leaf() && leaf.requires_grad() &&
                    !leaf.is_view() && !leaf.is_inference() &&
                    !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Tracer);
  return kept ? copies() : c10::intrusive_ptr<Copies>();
}

// Conversions of torch's would read memory that has been freed. Traced tensors have none.
void check_memory(const at::Tensor& tensor) {
  const c10::DispatchKeySet keys = tensor.key_set();
  const bool has_memory = !tensor.unsafeGetTensorImpl()->is_python_dispatch() &&
                          !keys.has(c10::DispatchKey::Functionalize) && !tensor._is_zerotensor();
  if (has_memory) checked_memory("autocast", "an operand", tensor, Access::read);
}

bool needs_no_gradient(const at::Tensor& tensor) {
  return !tensor.requires_grad() || tensor.is_inference() || c10::InferenceMode::is_enabled();
}

}  // namespace

at::Tensor lowered(const at::Tensor& tensor, at::ScalarType type) {
  if (tensor.scalar_type() == type) return tensor;
  check_memory(tensor);
  if (needs_no_gradient(tensor)) return tensor.to(type);
  if (const auto cache = copies_for(tensor)) return cache->of(tensor, type);
  return standing_for(tensor, copy_of(tensor, type));
}

at::Tensor lowered_matrix(const at::Tensor& weight, at::ScalarType type) {
  if (weight.scalar_type() != type && !needs_no_gradient(weight)) {
    if (const auto cache = copies_for(weight)) return cache->matrix_of(weight, type);
  }
  return lowered(as_matrix(weight), type);
}

}  // namespace amp_ext
