// A list of tensors as chunks of equal size: the unit of work of every multi-tensor kernel.
#pragma once

#include <cstdint>

#include "amp_ext/dtype.h"
#include "amp_ext/error.h"

namespace amp_ext {

// A tensor as kernels see it: dense memory, in whatever order its elements lie.
struct TensorRef {
  void* data;
  int64_t numel;
  DType dtype;
};

constexpr int64_t kChunkElements = 16384;

constexpr int64_t chunk_count(int64_t numel) {
  return (numel + kChunkElements - 1) / kChunkElements;
}

// A tensor and where its chunks begin in the flattened list. An empty tensor owns no chunk.
struct ChunkEntry {
  void* data;
  int64_t numel;
  uint32_t first_chunk;
  DType dtype;
  bool operator==(const ChunkEntry&) const = default;
};

// Lists up to this length travel in the kernel's parameters (32,764 bytes at most, CUDA >= 12.1).
constexpr int kInlineTensors = 1344;

// Writes one entry per tensor; *chunks receives the number of chunks of the whole list.
inline Status build_chunk_table(const TensorRef* tensors, int64_t size, ChunkEntry* entries,
                                uint32_t* chunks) {
  int64_t next = 0;
  for (int64_t i = 0; i < size; ++i) {
    const TensorRef& t = tensors[i];
    entries[i] = {t.data, t.numel, static_cast<uint32_t>(next), t.dtype};
    next += chunk_count(t.numel);
    if (next > UINT32_MAX) return Status::too_many_chunks;
  }
  *chunks = static_cast<uint32_t>(next);
  return Status::ok;
}

}  // namespace amp_ext
