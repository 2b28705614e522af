#include "autocast/weight_copies.h"

#include <ATen/CachedTensorUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_to_copy.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/variable.h>

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "checks/memory.h"

namespace amp_ext {
namespace {

// Returns a copy without a history of its own.
at::Tensor copy_of(const at::Tensor& tensor, at::ScalarType type) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return at::_to_copy(tensor, type);
}

// Returns the copy. Its gradient is passed on to the original.
at::Tensor with_gradient_edge(const at::Tensor& original, at::Tensor copy) {
  torch::autograd::impl::set_gradient_edge(copy, torch::autograd::impl::gradient_edge(original));
  return copy;
}

// Returns whether a tensor has memory. Traced tensors and autograd's zero tensors have none.
bool has_memory(const at::Tensor& tensor) {
  return !tensor.unsafeGetTensorImpl()->is_python_dispatch() &&
         !tensor.key_set().has(c10::DispatchKey::Functionalize) && !tensor._is_zerotensor();
}

// Returns whether copies of a tensor are kept. CUDA graphs of torch.compile write to the memory of
// their "cached" tensors without a new version.
bool is_kept(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat && tensor.is_leaf() && !tensor.is_view() &&
         !at::caching::is_cached_tensor(tensor);
}

// Keeps copies by their originals, for all threads. A copy holds the node that accumulates its
// original's gradient, and the node holds the original: the address in a key cannot become another
// tensor's.
class Copies final : public c10::BackendMeta {
 public:
  at::Tensor of(const at::Tensor& leaf, at::ScalarType type) {
    const Key key{leaf.unsafeGetTensorImpl(), type};
    // A kept copy serves while its original is unchanged.
    if (const auto kept = find(key); kept && kept->is_of(leaf)) return kept->copy;
    auto entry = std::make_shared<const Entry>(leaf, type);
    const at::Tensor copy = entry->copy;
    const std::lock_guard<std::mutex> lock(mutex_);
    copies_[key].swap(entry);
    return copy;
  }

 private:
  using Key = std::pair<c10::TensorImpl*, at::ScalarType>;
  // A copy, and its original's version and memory. A traced tensor's storage has none: data is
  // null. The weak reference keeps the storage's address from becoming another's.
  struct Entry {
    Entry(const at::Tensor& leaf, at::ScalarType type)
        : storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage_of(leaf))),
          data(data_of(leaf)),
          version(leaf._version()),
          copy(with_gradient_edge(leaf, copy_of(leaf, type))) {}
    bool is_of(const at::Tensor& now) const {
      return storage._unsafe_get_target() == storage_of(now) && data == data_of(now) &&
             version == now._version();
    }
    static c10::StorageImpl* storage_of(const at::Tensor& tensor) {
      return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    }
    static const void* data_of(const at::Tensor& tensor) {
      const auto* const data =
          static_cast<const char*>(storage_of(tensor)->_mutable_data_ptr_no_checks().get());
      return data ? data + tensor.storage_offset() * tensor.element_size() : nullptr;
    }

    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    const void* data;
    uint32_t version;
    at::Tensor copy;
  };

  // Counting a tensor's references, and destroying it, may enter Python: under the mutex only
  // entries are counted, and older ones are destroyed after it.
  std::shared_ptr<const Entry> find(const Key& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = copies_.find(key);
    return found == copies_.end() ? nullptr : found->second;
  }

  std::mutex mutex_;
  std::map<Key, std::shared_ptr<const Entry>> copies_;
};

// Returns the copies of a leaf inside torch's cache; null if its copies are not kept. They are
// attached to the cached copy of a tensor made for that purpose. torch does not report that it
// clears the cache: the copies are freed with it. Another thread may clear it at any time.
c10::intrusive_ptr<Copies> copies_for(const at::Tensor& leaf) {
  if (!is_kept(leaf) || !at::autocast::is_autocast_cache_enabled()) return {};
  // Hidden from dispatch modes and tracers.
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

bool needs_no_gradient(const at::Tensor& tensor) {
  return !tensor.requires_grad() || tensor.is_inference() || c10::InferenceMode::is_enabled();
}

}  // namespace

at::Tensor lowered(const at::Tensor& tensor, at::ScalarType type) {
  if (tensor.scalar_type() == type) return tensor;
  // torch's own conversion would read memory that has been freed.
  if (has_memory(tensor)) checked_memory("autocast", "an operand", tensor, Access::read);
  if (needs_no_gradient(tensor)) return tensor.to(type);
  if (const auto cache = copies_for(tensor)) return cache->of(tensor, type);
  return with_gradient_edge(tensor, copy_of(tensor, type));
}

// Autograd does not track the view of a tensor that needs no gradient. A step of another thread may
// write the tensor meanwhile, and views of no_grad refuse to be used then.
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
