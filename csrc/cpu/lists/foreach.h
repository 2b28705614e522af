// Walks a tensor list with several threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backend.h"
#include "parallel.h"

namespace amp_ext::cpu {

// Elements that justify waking a thread: about 0.3 ms of work, since a wake-up can take 0.1 ms.
constexpr int64_t kGrainElements = 1 << 20;

// Prefetching hides the cache misses of short tensors, which the processor does not predict. It
// loads the first bytes of the tensor kAhead indices ahead.
constexpr int64_t kAhead = 8;
constexpr int64_t kPrefetchBytes = 512;

inline void prefetch(const void* data, int64_t bytes) {
  for (int64_t at = 0; at < std::min(bytes, kPrefetchBytes); at += 64)
    __builtin_prefetch(static_cast<const char*>(data) + at);
}

inline void prefetch(const TensorRef& t) { prefetch(t.data, t.numel * size_of(t.dtype)); }

inline void prefetch(const CastRef& c) {
  prefetch(c.output, c.numel * size_of(c.output_dtype));
  prefetch(c.input, c.numel * size_of(c.input_dtype));
}

inline void prefetch(const UpdateRef& u) {
  prefetch(u.param, u.numel * size_of(u.param_dtype));
  prefetch(u.grad, u.numel * size_of(u.grad_dtype));
  if (u.exp_avg) prefetch(u.exp_avg, u.numel * size_of(u.exp_avg_dtype));
  if (u.exp_avg_sq) prefetch(u.exp_avg_sq, u.numel * size_of(u.exp_avg_sq_dtype));
}

inline char* element(void* data, DType dtype, int64_t index) {
  return static_cast<char*>(data) + index * size_of(dtype);
}

inline const char* element(const void* data, DType dtype, int64_t index) {
  return static_cast<const char*>(data) + index * size_of(dtype);
}

// A piece of a ref: numel elements from `offset` on.
struct Chunk {
  int64_t ref;    // index in the list
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
      if (i + kAhead < list.size) prefetch(list.refs[i + kAhead]);
      int64_t k = begin > start ? chunk_count(begin - start) : 0;
      for (; k * kChunkElements < ref.numel && start + k * kChunkElements < end; ++k) {
        const int64_t offset = k * kChunkElements;
        body(ref, Chunk{i, first_chunk + k, offset, std::min(kChunkElements, ref.numel - offset)});
      }
      start += ref.numel;
      first_chunk += chunk_count(ref.numel);
    }
  });
}

}  // namespace amp_ext::cpu
