// A list of tensors as chunks of equal size: the unit of work of every multi-tensor kernel.
#pragma once

#include <cstdint>

#include "amp_ext/dtype.h"
#include "amp_ext/error.h"

namespace amp_ext {

// What kernels see of one place in a list: dense memory, in whatever order the elements lie.
struct TensorRef {
  void* data;
  int64_t numel;
  DType dtype;
};

// Two tensors whose elements lie in the same order.
struct CastRef {
  void* output;
  const void* input;
  int64_t numel;
  DType output_dtype;
  DType input_dtype;
};

constexpr int64_t kChunkElements = 16384;

constexpr int64_t chunk_count(int64_t numel) {
  return (numel + kChunkElements - 1) / kChunkElements;
}

// A ref, packed, and where its chunks begin in the flattened list. One without elements owns no
// chunk.
struct ChunkEntry {
  void* data;
  int64_t numel;
  uint32_t first_chunk;
  DType dtype;
  bool operator==(const ChunkEntry&) const = default;
};

struct CastEntry {
  void* output;
  const void* input;
  int64_t numel;
  uint32_t first_chunk;
  DType output_dtype;
  DType input_dtype;
  bool operator==(const CastEntry&) const = default;
};

constexpr ChunkEntry entry_of(const TensorRef& t, uint32_t first_chunk) {
  return {t.data, t.numel, first_chunk, t.dtype};
}

constexpr CastEntry entry_of(const CastRef& t, uint32_t first_chunk) {
  return {t.output, t.input, t.numel, first_chunk, t.output_dtype, t.input_dtype};
}

template <class Ref>
using EntryOf = decltype(entry_of(Ref{}, 0));

// Lists up to this length travel in the kernel's parameters (32,764 bytes at most, CUDA >= 12.1):
// 1344 tensors, or 1008 pairs.
template <class Entry>
constexpr int kInlineEntries = 32256 / sizeof(Entry);

// Writes one entry per ref; *chunks receives the number of chunks of the whole list.
template <class Ref>
Status build_chunk_table(const Ref* refs, int64_t size, EntryOf<Ref>* entries, uint32_t* chunks) {
  int64_t next = 0;
  for (int64_t i = 0; i < size; ++i) {
    entries[i] = entry_of(refs[i], static_cast<uint32_t>(next));
    next += chunk_count(refs[i].numel);
    if (next > UINT32_MAX) return Status::too_many_chunks;
  }
  *chunks = static_cast<uint32_t>(next);
  return Status::ok;
}

}  // namespace amp_ext
