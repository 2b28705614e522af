#include "checks/memory.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <utility>

namespace amp_ext {

int64_t extent_of(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return last + 1;
}

namespace {

// Returns the error of two uses. A written use comes first.
std::string error_of(const std::string& op, const MemoryUse* a, const MemoryUse* b) {
  if (!a->is_written || (a->name == b->name && a->index > b->index)) std::swap(a, b);
  const auto name_of = [](const MemoryUse& use) {
    return use.index < 0 ? use.name : c10::str(use.name, '[', use.index, ']');
  };
  return c10::str(op, ": ", name_of(*a), " and ", name_of(*b), " overlap in memory, expected ",
                  name_of(*a), " apart from all else: clone() one");
}

}  // namespace

std::optional<std::string> find_overlap(const std::string& op, std::vector<MemoryUse> uses) {
  // Most of a list that is read lies outside of all written memory, and needs no sorting.
  uintptr_t begin = UINTPTR_MAX, end = 0;
  for (const MemoryUse& use : uses) {
    if (!use.is_written || use.range.is_empty()) continue;
    begin = std::min(begin, use.range.begin);
    end = std::max(end, use.range.end);
  }
  std::erase_if(uses, [=](const MemoryUse& use) {
    return use.range.is_empty() || use.range.end <= begin || use.range.begin >= end;
  });
  const auto begin_of = [](const MemoryUse& use) { return use.range.begin; };
  const auto end_of = [](const MemoryUse& use) {
    return use.first_bytes > 0 ? use.range.begin + use.first_bytes : use.range.end;
  };
  if (!std::ranges::is_sorted(uses, {}, begin_of)) std::ranges::sort(uses, {}, begin_of);
  // Of the uses before, the ones that reach farthest.
  const MemoryUse *last = nullptr, *last_written = nullptr;
  for (const MemoryUse& use : uses) {
    const MemoryUse* const other = use.is_written ? last : last_written;
    if (other && use.range.begin < end_of(*other)) return error_of(op, other, &use);
    if (!last || end_of(use) > end_of(*last)) last = &use;
    if (use.is_written && (!last_written || end_of(use) > end_of(*last_written)))
      last_written = &use;
  }
  for (const MemoryUse& view : uses) {
    for (size_t i = 0; view.first_bytes > 0 && i < uses.size(); ++i) {
      const MemoryRange &a = view.range, &b = uses[i].range;
      if (uses[i].name != view.name && a.begin < b.end && b.begin < a.end)
        return error_of(op, &view, &uses[i]);
    }
  }
  return std::nullopt;
}

}  // namespace amp_ext
