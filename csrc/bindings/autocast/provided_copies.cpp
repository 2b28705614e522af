#include "autocast/provided_copies.h"

#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "checks/seen.h"

namespace amp_ext {
namespace {

struct Provided {
  Seen weight;
  Seen copy;
};

using Entry = std::shared_ptr<const Provided>;

// Counting a tensor's references, and destroying it, may enter Python: under the mutex only entries
// are counted, and older ones are destroyed after it.
struct Registry {
  std::mutex mutex;
  std::unordered_map<c10::TensorImpl*, Entry> entries;  // by the weight
  size_t swept = 0;                                     // the size after the last sweep
};

Registry& registry() {
  static auto* const registry = new Registry;  // never destroyed: weights may go later
  return *registry;
}

}  // namespace

void provide_copies(const std::vector<at::Tensor>& weights, const std::vector<at::Tensor>& copies) {
  std::vector<Entry> entries;  // then the older ones
  for (size_t i = 0; i < weights.size(); ++i)
    entries.push_back(std::make_shared<const Provided>(Seen(weights[i]), Seen(copies[i])));
  auto& [mutex, provided, swept] = registry();
  const std::lock_guard<std::mutex> lock(mutex);
  for (size_t i = 0; i < weights.size(); ++i)
    provided[weights[i].unsafeGetTensorImpl()].swap(entries[i]);
  if (provided.size() <= 2 * swept + weights.size()) return;
  std::erase_if(provided, [&](auto& each) {
    const bool is_gone = each.second->weight.is_gone() || each.second->copy.is_gone();
    if (is_gone) entries.push_back(std::move(each.second));
    return is_gone;
  });
  swept = provided.size();
}

at::Tensor provided_copy(const at::Tensor& weight, at::ScalarType type) {
  Entry entry;
  {
    auto& [mutex, provided, swept] = registry();
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = provided.find(weight.unsafeGetTensorImpl());
    if (found != provided.end()) entry = found->second;
  }
  if (!entry || !entry->weight.is(weight)) return {};
  at::Tensor copy = entry->copy.unchanged();
  return copy.defined() && copy.scalar_type() == type ? copy : at::Tensor();
}

}  // namespace amp_ext
