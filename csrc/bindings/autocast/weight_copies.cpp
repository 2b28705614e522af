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
#include "checks/seen.h"

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
  return tensor.scalar_type() == at::kFloat && tensor.is_leaf() && tensor.requires_grad() &&
         !tensor.is_view() && !tensor.is_inference() && !at::caching::is_cached_tensor(tensor);
}

// A copy that an optimizer has written with its weight.
struct Provided {
  Seen weight;
  Seen copy;
};

// Entries by their keys, for all threads. Counting a tensor's references, and destroying it, may
// enter Python: under the mutex only entries are counted, and older ones are destroyed after it.
template <class Key, class Entry>
struct Registry {
  using Kept = std::shared_ptr<const Entry>;

  Kept find(const Key& key) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = entries.find(key);
    return found == entries.end() ? nullptr : found->second;
  }
  void keep(const Key& key, Kept entry) {
    const std::lock_guard<std::mutex> lock(mutex);
    entries[key].swap(entry);
  }

  std::mutex mutex;
  std::map<Key, Kept> entries;
};

using ProvidedCopies = Registry<c10::TensorImpl*, Provided>;

ProvidedCopies& provided() {
  static auto* const registry = new ProvidedCopies;  // never destroyed: weights may go later
  return *registry;
}

// Returns the copy that an optimizer has written, or a cast. The former is a view: its version
// shows that the next step has overwritten data for a backward pass.
at::Tensor new_copy_of(const at::Tensor& leaf, at::ScalarType type) {
  const auto entry = provided().find(leaf.unsafeGetTensorImpl());
  if (!entry || !entry->weight.is(leaf)) return copy_of(leaf, type);
  const at::Tensor copy = entry->copy.unchanged();
  if (!copy.defined() || copy.scalar_type() != type) return copy_of(leaf, type);
  const at::NoGradGuard no_grad;
  return copy.detach();
}

// Keeps copies by their originals. A copy holds the node that accumulates its original's gradient,
// and the node holds the original: the address in a key cannot become another tensor's.
class Copies final : public c10::BackendMeta {
 public:
  at::Tensor of(const at::Tensor& leaf, at::ScalarType type) {
    const Key key{leaf.unsafeGetTensorImpl(), type};
    // A kept copy serves while its original is unchanged.
    if (const auto kept = copies_.find(key); kept && kept->original.is(leaf)) return kept->copy;
    const Seen original(leaf);
    const at::Tensor copy = with_gradient_edge(leaf, new_copy_of(leaf, type));
    copies_.keep(key, std::make_shared<const Entry>(original, copy));
    return copy;
  }

 private:
  using Key = std::pair<c10::TensorImpl*, at::ScalarType>;
  struct Entry {
    Seen original;
    at::Tensor copy;
  };

  Registry<Key, Entry> copies_;
};

// Returns the copies of a leaf inside torch's cache; null if its copies are not kept. They are
// attached to the cached copy of a tensor made for that purpose. torch does not report that it
// clears the cache: the copies are freed with it. Another thread may clear it at any time.
c10::intrusive_ptr<Copies> copies_for(const at::Tensor& leaf) {
  const bool traced = c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Tracer);
  if (!is_kept(leaf) || traced || !at::autocast::is_autocast_cache_enabled()) return {};
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

void provide_copies(const std::vector<at::Tensor>& weights, const std::vector<at::Tensor>& copies) {
  std::vector<std::shared_ptr<const Provided>> entries;  // then the older ones
  for (size_t i = 0; i < weights.size(); ++i)
    entries.push_back(std::make_shared<const Provided>(Seen(weights[i]), Seen(copies[i])));
  const std::lock_guard<std::mutex> lock(provided().mutex);
  for (size_t i = 0; i < weights.size(); ++i)
    provided().entries[weights[i].unsafeGetTensorImpl()].swap(entries[i]);
  // Many optimizers would else visit each other's copies at each step.
  static size_t left = 0;
  if (provided().entries.size() <= 2 * left + weights.size()) return;
  std::erase_if(provided().entries, [&](auto& each) {
    const bool is_gone = each.second->weight.is_gone() || each.second->copy.is_gone();
    if (is_gone) entries.push_back(std::move(each.second));
    return is_gone;
  });
  left = provided().entries.size();
}

}  // namespace amp_ext
