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

// Orders two uses for an error: a written one comes first.
Overlap in_order(const MemoryUse* a, const MemoryUse* b) {
  if (!a->is_written || (a->name == b->name && a->index > b->index)) std::swap(a, b);
  return {*a, *b};
}

}  // namespace

std::optional<Overlap> find_overlap(std::vector<MemoryUse> uses) {
  if (std::ranges::none_of(uses, &MemoryUse::is_written)) return std::nullopt;
  std::erase_if(uses, [](const MemoryUse& use) { return use.range.is_empty(); });
  const auto begin_of = [](const MemoryUse& use) { return use.range.begin; };
  const auto end_of = [](const MemoryUse& use) {
    return use.first_bytes > 0 ? use.range.begin + use.first_bytes : use.range.end;
  };
  if (std::ranges::is_sorted(uses, std::ranges::greater(), begin_of)) std::ranges::reverse(uses);
  if (!std::ranges::is_sorted(uses, {}, begin_of)) std::ranges::sort(uses, {}, begin_of);
  // Of the uses before, the ones that reach farthest.
  const MemoryUse *last = nullptr, *last_written = nullptr;
  for (const MemoryUse& use : uses) {
    const MemoryUse* const other = use.is_written ? last : last_written;
    if (other && use.range.begin < end_of(*other)) return in_order(other, &use);
    if (!last || end_of(use) > end_of(*last)) last = &use;
    if (use.is_written && (!last_written || end_of(use) > end_of(*last_written)))
      last_written = &use;
  }
  const auto has_holes = [](const MemoryUse& use) { return use.first_bytes > 0; };
  const auto first_view = std::ranges::find_if(uses, has_holes);
  if (first_view == uses.end()) return std::nullopt;
  std::vector<const MemoryUse*> others;  // than the list of these tensors
  for (const MemoryUse& use : uses) {
    if (use.name != first_view->name) others.push_back(&use);
  }
  for (const MemoryUse& view : uses) {
    if (!has_holes(view)) continue;
    for (const MemoryUse* const other : others) {
      if (view.range.overlaps(other->range)) return in_order(&view, other);
    }
  }
  return std::nullopt;
}

void check_overlap(const char* op, std::vector<MemoryUse> uses) {
  const std::optional<Overlap> found = find_overlap(std::move(uses));
  if (!found) return;
  const auto name_of = [](const MemoryUse& use) {
    return use.index < 0 ? use.name : c10::str(use.name, '[', use.index, ']');
  };
  const std::string a = name_of(found->first), b = name_of(found->second);
  TORCH_CHECK(false, op, ": ", a, " and ", b, " overlap in memory, expected ", a,
              " apart from all else: clone() one");
}

}  // namespace amp_ext
