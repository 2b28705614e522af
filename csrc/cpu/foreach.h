// The walk of a tensor list by several threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "amp_ext/launch.h"

namespace amp_ext::cpu {

// Elements that are worth waking a thread for: about 0.3 ms of work, since a wake can take 0.1 ms.
constexpr int64_t kGrainElements = 1 << 20;

// Short tensors are cache misses that the processor does not foresee: the memory of the tensor
// kAhead places on, or the beginning of it, is asked for early.
constexpr int64_t kAhead = 8;
constexpr int64_t kPrefetchBytes = 512;

inline void prefetch(const TensorRef& tensor) {
  const int64_t bytes = std::min(tensor.numel * size_of(tensor.dtype), kPrefetchBytes);
  for (int64_t at = 0; at < bytes; at += 64)
    __builtin_prefetch(static_cast<char*>(tensor.data) + at, 1);
}

// A piece of one tensor that lies within one chunk.
struct Chunk {
  int64_t tensor;  // index in the list
  int64_t index;   // of the chunk, in the whole list
  char* data;
  int64_t numel;
  DType dtype;
};

// Calls body(chunk) for every chunk of the list. Threads share the elements evenly; a chunk belongs
// to the thread whose share holds its first element, so chunks are the same whatever the number of
// threads.
template <class Body>
void for_each_chunk(const TensorList& list, const CpuContext& context, Body body) {
  struct Walk {
    const TensorList& list;
    Body& body;
  } walk{list, body};

  int64_t total = 0;
  for (int64_t i = 0; i < list.size; ++i) total += list.tensors[i].numel;

  context.parallel_for(total, kGrainElements, &walk, [](void* opaque, int64_t begin, int64_t end) {
    auto& [list, body] = *static_cast<Walk*>(opaque);
    int64_t start = 0;  // of the tensor, in elements of the flattened list
    int64_t first_chunk = 0;
    for (int64_t i = 0; i < list.size && start < end; ++i) {
      const TensorRef& t = list.tensors[i];
      if (i + kAhead < list.size) prefetch(list.tensors[i + kAhead]);
      int64_t k = begin > start ? chunk_count(begin - start) : 0;
      for (; k * kChunkElements < t.numel && start + k * kChunkElements < end; ++k) {
        const int64_t offset = k * kChunkElements;
        body(Chunk{i, first_chunk + k, static_cast<char*>(t.data) + offset * size_of(t.dtype),
                   std::min(kChunkElements, t.numel - offset), t.dtype});
      }
      start += t.numel;
      first_chunk += chunk_count(t.numel);
    }
  });
}

}  // namespace amp_ext::cpu
