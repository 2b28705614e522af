// Walks a tensor list with several threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backend.h"
#include "parallel.h"

namespace amp_ext::cpu {

// The most elements for one thread alone: 40 to 100 us of work. Waking a thread takes up to 0.1 ms.
constexpr int64_t kGrainElements = 1 << 18;

inline char* element(void* data, DType dtype, int64_t index) {
  return static_cast<char*>(data) + index * size_of(dtype);
}

inline const char* element(const void* data, DType dtype, int64_t index) {
  return static_cast<const char*>(data) + index * size_of(dtype);
}

// A piece of a ref: numel elements from `offset` on.
struct Chunk {
  int64_t index;  // index of the chunk in the whole list
  int64_t offset;
  int64_t numel;
};

// Calls body(ref, chunk) for every chunk of the list. Threads share the elements evenly. A chunk
// belongs to the thread whose share holds its first element, so chunks are independent of the
// number of threads.
template <class Ref, class Body>
void for_each_chunk(const ListOf<Ref>& list, const Host& host, Body body) {
  int64_t total = 0;
  for (int64_t i = 0; i < list.size; ++i) total += list.refs[i].numel;

  parallel(host, total, kGrainElements, [&](int64_t begin, int64_t end) {
    int64_t start = 0;  // first element of the ref in the flattened list
    int64_t first_chunk = 0;
    for (int64_t i = 0; i < list.size && start < end; ++i) {
      const Ref& ref = list.refs[i];
      int64_t k = begin > start ? chunk_count(begin - start) : 0;
      for (; k * kChunkElements < ref.numel && start + k * kChunkElements < end; ++k) {
        const int64_t offset = k * kChunkElements;
        body(ref, Chunk{first_chunk + k, offset, std::min(kChunkElements, ref.numel - offset)});
      }
      start += ref.numel;
      first_chunk += chunk_count(ref.numel);
    }
  });
}

}  // namespace amp_ext::cpu
