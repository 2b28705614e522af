#include "free_checks.h"

#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/DimVector.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "backend.h"
#include "tensor_args.h"

namespace amp_ext {
namespace {

// One launch clears so many flags.
constexpr int kPoolFlags = 1024;

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// Flags that are handed out on one stream: it has cleared them before it writes to them.
struct Pool {
  at::Tensor flags;
  c10::Stream stream;
  int used = 0;
};

// What is known of the memory of a storage. A weak reference keeps the storage's address from being
// used again, but not its memory.
struct Verdict {
  Verdict(const at::Tensor& result, Flag flag)
      : storage(result.storage().getWeakStorageImpl()),
        counter(result.unsafeGetTensorImpl()->version_counter()),
        version(counter.current_version()),
        data(result.const_data_ptr()),
        sizes(result.sizes()),
        strides(result.strides()),
        flag(std::move(flag)) {}

  bool holds_for(const at::Tensor& grad) const {
    return address_of(grad.unsafeGetTensorImpl()->version_counter()) == address_of(counter) &&
           counter.current_version() == version && grad.scalar_type() == at::kFloat &&
           grad.const_data_ptr() == data && grad.sizes() == sizes && grad.strides() == strides;
  }

  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  c10::VariableVersion counter;  // the very counter: another tensor on the memory may have another
  uint32_t version;
  const void* data;
  c10::DimVector sizes, strides;
  Flag flag;
};

// Nothing is allocated or freed under its lock: that may wait for Python's, whose holder may be
// waiting for this one.
class Registry {
 public:
  Flag new_flag(c10::Device device) {
    const c10::Stream stream = current_stream(device);
    at::Tensor fresh;
    while (true) {
      if (std::optional<Flag> flag = flag_of(stream, fresh)) return *std::move(flag);
      fresh = at::zeros({kPoolFlags}, at::TensorOptions(at::kFloat).device(device));
    }
  }

  void remember(Verdict verdict) {
    std::vector<Verdict> gone;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (verdicts_.size() >= sweep_at_) {
      for (auto it = verdicts_.begin(); it != verdicts_.end();) {
        const bool expired = it->second.storage.expired();
        if (expired) gone.push_back(std::move(it->second));
        it = expired ? verdicts_.erase(it) : std::next(it);
      }
      sweep_at_ = std::max(kFirstSweep, 2 * verdicts_.size());
    }
    const void* const key = verdict.storage._unsafe_get_target();
    const auto [place, is_new] = verdicts_.try_emplace(key, std::move(verdict));
    if (!is_new) std::swap(place->second, verdict);
  }

  std::optional<Verdict> take(const c10::StorageImpl* storage) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = verdicts_.find(storage);
    if (found == verdicts_.end()) return std::nullopt;
    std::optional<Verdict> verdict(std::move(found->second));
    verdicts_.erase(found);
    return verdict;
  }

  void forget() {
    Verdicts gone;
    const std::lock_guard<std::mutex> lock(mutex_);
    verdicts_.swap(gone);
  }

 private:
  using Verdicts = std::unordered_map<const void*, Verdict>;
  static constexpr size_t kFirstSweep = 256;

  // None if the stream's pool is used up, and no fresh one is given.
  std::optional<Flag> flag_of(c10::Stream stream, at::Tensor& fresh) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto pool = std::find_if(pools_.begin(), pools_.end(),
                             [&](const Pool& p) { return p.stream == stream; });
    if (pool == pools_.end()) pool = pools_.insert(pool, Pool{{}, stream, kPoolFlags});
    if (pool->used == kPoolFlags) {
      if (!fresh.defined()) return std::nullopt;
      std::swap(pool->flags, fresh);
      pool->used = 0;
    }
    return Flag{pool->flags, stream, pool->flags.mutable_data_ptr<float>() + pool->used++};
  }

  std::mutex mutex_;
  std::vector<Pool> pools_;
  Verdicts verdicts_;
  size_t sweep_at_ = kFirstSweep;
};

// Never destroyed: the CUDA context may go first.
Registry& registry() {
  static auto* const instance = new Registry;
  return *instance;
}

// Whether only this tensor holds its memory. A live Python wrapper of the storage, and every other
// tensor on it, whose version may be counted apart, is one owner more; a weak reference is none.
bool is_sole_owner(const at::Tensor& tensor) {
  return tensor.has_storage() && tensor.storage().use_count() == 1;
}

std::atomic<bool> judging{false};
thread_local bool asked = false;

}  // namespace

void judge_gradients(bool on) {
  if (judging.exchange(on) != on) registry().forget();
}

void forget_verdicts() { registry().forget(); }

bool judges_gradients() { return judging; }

AskProducts::AskProducts(bool on) : before_(std::exchange(asked, on)) {}
AskProducts::~AskProducts() { asked = before_; }

std::optional<Flag> flag_for(const at::Tensor& result) {
  // A flag is cleared once, and a captured graph writes to it again and again.
  if (!asked || result.scalar_type() != at::kFloat || result.is_inference() ||
      !is_sole_owner(result) ||
      backend_for("amp_ext::gemm", result.device()).is_capturing(result.device()))
    return std::nullopt;
  return registry().new_flag(result.device());
}

void remember_verdict(const at::Tensor& result, const Flag& flag) {
  registry().remember(Verdict(result, flag));
}

std::optional<Flag> take_verdict(const at::Tensor& grad) {
  if (!judging || !grad.has_storage() || grad.is_inference()) return std::nullopt;
  std::optional<Verdict> verdict = registry().take(grad.storage().unsafeGetStorageImpl());
  // A captured check would look at this flag at every replay.
  if (!verdict || !verdict->holds_for(grad) || !is_sole_owner(grad) ||
      backend_for("amp_ext::check_finite", grad.device()).is_capturing(grad.device()))
    return std::nullopt;
  // Its memory is not to be used again before the check that is to come has read it.
  const c10::Stream reader = current_stream(grad.device());
  if (reader != verdict->flag.stream) verdict->flag.pool.record_stream(reader);
  return std::move(verdict->flag);
}

}  // namespace amp_ext
