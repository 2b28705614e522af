// Finds tensors in memory, and their overlaps.
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
  bool overlaps(const MemoryRange& other) const { return begin < other.end && other.begin < end; }
  void* data() const { return reinterpret_cast<void*>(begin); }
};

// Returns how many elements lie between the first and the last of a tensor that has elements, both
// included.
int64_t extent_of(const at::Tensor& tensor);

enum class Access { read, write };

// A function of its own, so that the check itself is inlined.
template <class Name>
[[noreturn, gnu::cold, gnu::noinline]] void throw_too_small(const char* op, const Name& name,
                                                            int64_t needed, int64_t held) {
  TORCH_CHECK(false, op, ": ", name, " needs a storage of ", needed, " bytes, but its storage has ",
              held,
              ": expected one that has not been freed or shrunk by untyped_storage().resize_()");
}

// Returns a tensor's memory, from its first element to its last. Throws unless its storage holds
// them: it may have been freed or shrunk. `name` is the tensor's name in errors.
template <class Name>
MemoryRange checked_memory(const char* op, const Name& name, const at::Tensor& tensor,
                           Access access) {
  if (tensor.numel() == 0) return {};
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  const int64_t extent = tensor.is_non_overlapping_and_dense() ? tensor.numel() : extent_of(tensor);
  const auto size = static_cast<int64_t>(tensor.unsafeGetTensorImpl()->itemsize());
  const int64_t offset = tensor.storage_offset() * size, bytes = extent * size;
  const void* const data = access == Access::write ? storage->mutable_data() : storage->data();
  const int64_t held = data ? static_cast<int64_t>(storage->nbytes()) : 0;
  if (offset + bytes > held) throw_too_small(op, name, offset + bytes, held);
  return {static_cast<const char*>(data) + offset, bytes};
}

// Returns the address of a contiguous tensor's elements of `size` bytes; null unless it has a
// storage that holds them.
inline void* plain_memory(const at::TensorImpl& tensor, int64_t numel, int64_t size,
                          Access access) {
  c10::StorageImpl* const storage = tensor.unsafe_storage().unsafeGetStorageImpl();
  const int64_t offset = tensor.storage_offset() * size;
  if (!storage || static_cast<int64_t>(storage->nbytes()) < offset + numel * size) return nullptr;
  auto* const data = static_cast<char*>(
      access == Access::write ? storage->mutable_data() : const_cast<void*>(storage->data()));
  return data ? data + offset : nullptr;
}

// The memory of an argument of a call.
struct MemoryUse {
  MemoryRange range;
  const char* name;  // of the argument or list; a list has one pointer
  int64_t index;     // in the list; -1 for an argument of its own
  bool is_written;
  // The bytes of an element of a written tensor with holes, else 0. Within its list such a tensor
  // counts by its first element alone, so that tensors may interleave.
  int64_t first_bytes = 0;
};

// Two uses that overlap, of which the first is written.
using Overlap = std::pair<MemoryUse, MemoryUse>;
std::optional<Overlap> find_overlap(std::vector<MemoryUse> uses);

// Throws if memory that an op writes overlaps anything else.
void check_overlap(const char* op, std::vector<MemoryUse> uses);

}  // namespace amp_ext
