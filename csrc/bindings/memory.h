// Where tensors lie in memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace amp_ext {

// The addresses from the first byte to behind the last; both 0 where there is none.
struct MemoryRange {
  uintptr_t begin = 0;
  uintptr_t end = 0;

  MemoryRange() = default;
  MemoryRange(const void* data, int64_t bytes)
      : begin(reinterpret_cast<uintptr_t>(data)), end(begin + bytes) {}

  bool is_empty() const { return begin == end; }
};

inline bool overlap(const MemoryRange& a, const MemoryRange& b) {
  return a.begin < b.end && b.begin < a.end;
}

// How many elements lie between the first and the last of a tensor that has elements, both
// included.
int64_t extent_of(const at::Tensor& tensor);

// How many bytes these are. Throws unless the tensor's storage holds them: it may have been freed
// or shrunk. `name` is what errors call the tensor.
template <class Name>
int64_t checked_bytes(const char* op, const Name& name, const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  const auto size = static_cast<int64_t>(tensor.element_size());
  const int64_t extent = extent_of(tensor);
  const int64_t needed = (tensor.storage_offset() + extent) * size;
  const c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  const int64_t held = storage->data() ? static_cast<int64_t>(storage->nbytes()) : 0;
  TORCH_CHECK(needed <= held, op, ": ", name, " needs a storage of ", needed,
              " bytes, but its storage has ", held,
              ": expected one that has not been freed or shrunk by untyped_storage().resize_()");
  return extent * size;
}

// Whether the memory of two tensors, each from its first element to its last, overlaps.
bool overlap(const at::Tensor& a, const at::Tensor& b);

// Two of the ranges that overlap, if there are any.
std::optional<std::pair<MemoryRange, MemoryRange>> find_overlap(std::vector<MemoryRange> ranges);

}  // namespace amp_ext
