#include "checks/memory.h"

#include <algorithm>

namespace amp_ext {

int64_t extent_of(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense()) return tensor.numel();
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return last + 1;
}

namespace {

// Returns the indices of two ranges, or of the first two if both are the same.
IndexPair indices_of(const std::vector<MemoryRange>& ranges, const MemoryRange& a,
                     const MemoryRange& b) {
  const auto index_of = [&](const MemoryRange& range, size_t first) -> size_t {
    const auto same = [&](const MemoryRange& r) {
      return r.begin == range.begin && r.end == range.end;
    };
    return std::find_if(ranges.begin() + first, ranges.end(), same) - ranges.begin();
  };
  const size_t first = index_of(a, 0), second = index_of(b, 0);
  return first == second ? IndexPair(first, index_of(b, first + 1))
                         : IndexPair(std::minmax(first, second));
}

}  // namespace

std::optional<IndexPair> find_overlap(const std::vector<MemoryRange>& ranges, size_t written) {
  const auto no_gap = [](const MemoryRange& a, const MemoryRange& b) { return a.end > b.begin; };
  if (written == ranges.size() &&
      (std::adjacent_find(ranges.begin(), ranges.end(), no_gap) == ranges.end() ||
       std::adjacent_find(ranges.rbegin(), ranges.rend(), no_gap) == ranges.rend()))
    return std::nullopt;
  std::vector<MemoryRange> sorted(ranges.begin(), ranges.begin() + written);
  std::erase_if(sorted, [](const MemoryRange& range) { return range.is_empty(); });
  std::ranges::sort(sorted, {}, &MemoryRange::begin);
  const auto found = std::adjacent_find(sorted.begin(), sorted.end(), no_gap);
  if (found != sorted.end()) return indices_of(ranges, found[0], found[1]);
  for (size_t i = written; i < ranges.size(); ++i) {
    const auto behind = std::ranges::lower_bound(sorted, ranges[i].end, {}, &MemoryRange::begin);
    if (behind != sorted.begin() && overlap(behind[-1], ranges[i]))
      return IndexPair(indices_of(ranges, behind[-1], behind[-1]).first, i);
  }
  return std::nullopt;
}

}  // namespace amp_ext
