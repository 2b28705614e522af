#include "autocast/copy_cache.h"

#include <ATen/CachedTensorUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <list>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "autocast/copy.h"
#include "autocast/provided_copies.h"
#include "autocast/weight_history.h"
#include "backends/backends.h"
#include "lists/lists.h"

namespace amp_ext {
namespace {

std::atomic<bool> casts_together = false;

// Whether copies of a tensor are kept. CUDA graphs of torch.compile write to the memory of their
// "cached" tensors without a new version.
bool is_kept(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat && tensor.is_leaf() && tensor.requires_grad() &&
         !tensor.is_view() && !tensor.is_inference() && !at::caching::is_cached_tensor(tensor);
}

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

c10::Stream current_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// The copy that an optimizer has written, or a cast. The former is a view, whose version says when
// the next step has overwritten what a backward pass needs.
at::Tensor new_copy_of(const at::Tensor& leaf, at::ScalarType type) {
  if (const at::Tensor provided = provided_copy(leaf, type); provided.defined()) {
    const at::NoGradGuard no_grad;
    return provided.detach();
  }
  return copy_of(leaf, type);
}

// Whether a dispatch mode or a tracer has to see every op.
bool is_observed() {
  return !(c10::impl::tls_local_dispatch_key_set().included_ - c10::default_included_set -
           c10::autocast_dispatch_keyset)
              .empty();
}

History& history() {
  static auto* const history = new History;  // never destroyed: weights may go later
  return *history;
}

// A copy holds the node that accumulates its original's gradient, and that holds the original: an
// address that is a key here cannot become another tensor's.
//
// When a weight is cast that began a sequence in an earlier region, all weights of that sequence
// are cast in one launch. A sequence some of whose weights were not used stops growing, so that
// regions which begin alike, such as a forward pass and its first checkpoint, end up with sequences
// for the parts that they share.
class Copies final : public c10::BackendMeta {
 public:
  at::Tensor of(const at::Tensor& leaf, at::ScalarType type) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return entry(leaf, type).copy;
  }

 private:
  // A sequence that is being recorded.
  struct Run {
    at::Device device;
    at::ScalarType type;
    c10::Stream stream;
    std::shared_ptr<Sequence> sequence;
  };

  struct Entry {
    int64_t version = 0;
    c10::StorageImpl* storage = nullptr;
    at::Tensor copy;
    Run* unused_in = nullptr;  // until the first use
  };

  Entry& entry(const at::Tensor& leaf, at::ScalarType type) {
    Entry& entry = entries_[{leaf.unsafeGetTensorImpl(), type}];
    if (casts_together && !entry.copy.defined() && has_memory(leaf)) begin(entry, leaf, type);
    if (!is_current(entry, leaf)) set(entry, leaf, new_copy_of(leaf, type));
    if (const Run* const run = std::exchange(entry.unused_in, nullptr))
      history().note_use(*run->sequence, leaf);
    return entry;
  }

  // Whether the copy is the one that would be made now.
  static bool is_current(const Entry& entry, const at::Tensor& leaf) {
    return entry.copy.defined() && entry.version == leaf._version() &&
           entry.storage == storage_of(leaf) &&
           (!entry.unused_in || entry.unused_in->stream == current_stream(leaf.device()));
  }

  static void set(Entry& entry, const at::Tensor& leaf, at::Tensor copy) {
    entry.version = leaf._version();
    entry.storage = storage_of(leaf);
    entry.copy = with_gradient_edge(leaf, std::move(copy));
  }

  // Makes a new entry part of a run; casts what is expected after it.
  void begin(Entry& entry, const at::Tensor& leaf, at::ScalarType type) {
    const Sequence expected = history().find(leaf, type);
    const bool is_known = !expected.weights.empty();
    const at::Device device = leaf.device();
    const auto current = std::find_if(runs_.rbegin(), runs_.rend(), [&](const Run& run) {
      return run.device == device && run.type == type;
    });
    Run* run = current == runs_.rend() ? nullptr : &*current;
    if (!run || is_known || !run->sequence->may_grow) {
      const bool may_grow = expected.may_grow && expected.unused == 0;
      auto sequence = history().start(leaf, type, may_grow);
      run = &runs_.emplace_back(Run{device, type, current_stream(device), std::move(sequence)});
    } else {
      history().note_cast(*run->sequence, 1);
      entry.unused_in = run;
    }
    const bool is_16_bit = type == at::kHalf || type == at::kBFloat16;
    // A captured graph would go on to read, at every replay, weights that it does not need.
    if (expected.weights.size() > 1 && is_16_bit && has_backend(device.type()) && !is_observed() &&
        !is_capturing(device))
      cast_together(expected, *run, entry);
  }

  void cast_together(const Sequence& expected, Run& run, const Entry& first) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    std::vector<at::Tensor> weights, copies;
    for (const WeakTensor& weak : expected.weights) {
      auto alive = weak.lock();
      if (!alive) continue;
      at::Tensor weight(std::move(alive));
      if (!is_kept(weight) || weight.device() != run.device || !is_whole(weight) ||
          provided_copy(weight, run.type).defined() ||
          entries_[{weight.unsafeGetTensorImpl(), run.type}].copy.defined())
        continue;
      copies.push_back(at::empty_like(weight, weight.options().dtype(run.type)));
      weights.push_back(std::move(weight));
    }
    cast_(copies, weights);
    int64_t unused = 0;
    for (size_t i = 0; i < weights.size(); ++i) {
      Entry& entry = entries_[{weights[i].unsafeGetTensorImpl(), run.type}];
      set(entry, weights[i], std::move(copies[i]));
      if (&entry == &first) continue;
      entry.unused_in = &run;
      ++unused;
    }
    history().note_cast(*run.sequence, unused);
  }

  // Whether the tensor is dense and its memory allocated: it may have been freed between uses.
  static bool is_whole(const at::Tensor& weight) {
    return weight.is_non_overlapping_and_dense() &&
           (weight.storage_offset() + weight.numel()) * weight.element_size() <=
               static_cast<int64_t>(storage_of(weight)->nbytes());
  }

  static void cast_(const std::vector<at::Tensor>& copies, const std::vector<at::Tensor>& weights) {
    RECORD_FUNCTION("amp_ext::cast_", c10::ArrayRef<const c10::IValue>{});
    std::vector<const at::Tensor*> to, from;
    for (const at::Tensor& copy : copies) to.push_back(&copy);
    for (const at::Tensor& weight : weights) from.push_back(&weight);
    amp_ext::cast_(to, from);
  }

  std::mutex mutex_;
  std::map<std::pair<at::TensorImpl*, at::ScalarType>, Entry> entries_;
  std::list<Run> runs_;
};

// The copies live inside torch's cache, attached to the cached copy of a tensor made for that
// purpose, since torch reports to nobody that it clears the cache: they are freed with it. Another
// thread may clear it at any time. Null where copies of `leaf` are not kept.
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

}  // namespace

void cast_weights_together(bool on) { casts_together = on; }

at::Tensor kept_copy(const at::Tensor& leaf, at::ScalarType type) {
  const auto cache = copies_for(leaf);
  return cache ? cache->of(leaf, type) : at::Tensor();
}

}  // namespace amp_ext
