// In which order regions use their weights.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "checks/seen.h"

namespace amp_ext {

// Weights of one device in the order in which a region first used them.
struct Sequence {
  std::vector<WeakTensor> weights;
  int64_t unused = 0;  // how many more have been cast
  bool may_grow = true;
};

// The sequence of the last region that began with a weight: what the next one will need. A weak
// reference keeps the weight's address from becoming another tensor's.
class History {
 public:
  // A copy; empty if there is none.
  Sequence find(const at::Tensor& first, at::ScalarType type) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = sequences_.find({first.unsafeGetTensorImpl(), type});
    return found == sequences_.end() ? Sequence{} : *found->second;
  }

  std::shared_ptr<Sequence> start(const at::Tensor& first, at::ScalarType type, bool may_grow) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Key key{first.unsafeGetTensorImpl(), type};
    if (!sequences_.contains(key))
      std::erase_if(sequences_, [](auto& s) { return s.second->weights.front().expired(); });
    Sequence sequence{{WeakTensor(first.getIntrusivePtr())}, 0, may_grow};
    return sequences_[key] = std::make_shared<Sequence>(std::move(sequence));
  }

  void note_cast(Sequence& sequence, int64_t count) {
    const std::lock_guard<std::mutex> lock(mutex_);
    sequence.unused += count;
  }

  void note_use(Sequence& sequence, const at::Tensor& weight) {
    const std::lock_guard<std::mutex> lock(mutex_);
    --sequence.unused;
    sequence.weights.emplace_back(weight.getIntrusivePtr());
  }

 private:
  using Key = std::pair<c10::TensorImpl*, at::ScalarType>;

  std::mutex mutex_;
  std::map<Key, std::shared_ptr<Sequence>> sequences_;
};

}  // namespace amp_ext
