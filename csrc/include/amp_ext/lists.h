// Defines the arguments of the ops on tensor lists, and the chunk table of a list.
//
// A chunk has a fixed number of elements and is the unit of work of every multi-tensor kernel.
// Pointers are device pointers for the CUDA and Triton kernels and host pointers for the CPU
// kernels, unless a comment says otherwise.
#pragma once

#include <cstdint>

#include "amp_ext/dtype.h"
#include "amp_ext/status.h"

namespace amp_ext {

// A tensor of a list: dense memory, with the elements in any order. In a chunk table `first_chunk`
// is the index of the tensor's first chunk in the flattened list. An empty tensor owns no chunk.
struct TensorRef {
  void* data;
  int64_t numel;
  uint32_t first_chunk;
  DType dtype;
};

// A pair of tensors whose elements have the same order.
struct CastRef {
  void* output;
  const void* input;
  int64_t numel;
  uint32_t first_chunk;
  DType output_dtype;
  DType input_dtype;
};

constexpr int64_t kChunkElements = 16384;

constexpr int64_t chunk_count(int64_t numel) {
  return (numel + kChunkElements - 1) / kChunkElements;
}

// The granularity at which the CUDA kernels balance work between blocks.
constexpr int kPieceElements = 2048;
constexpr uint32_t kChunkPieces = kChunkElements / kPieceElements;

// A list of tensors, or of groups of tensors. `refs` is host memory.
template <class Ref>
struct ListOf {
  const Ref* refs = nullptr;
  int64_t size = 0;
};

// Copies the refs with their first_chunk, and stores the list's number of chunks in *chunks.
template <class Ref>
Status build_chunk_table(const ListOf<Ref>& list, Ref* entries, uint32_t* chunks) {
  int64_t next = 0;
  for (int64_t i = 0; i < list.size; ++i) {
    entries[i] = list.refs[i];
    entries[i].first_chunk = static_cast<uint32_t>(next);
    next += chunk_count(list.refs[i].numel);
    if (next > UINT32_MAX / kChunkPieces) return Status::too_many_chunks;
  }
  *chunks = static_cast<uint32_t>(next);
  return Status::ok;
}

using TensorList = ListOf<TensorRef>;
using CastList = ListOf<CastRef>;

// Computes grads *= inv_scale, and sets found_inf = 1 if a product is not finite. If inv_scale is
// 1, grads are not written.
//
// With a norm, the norm of grads * inv_scale, the products are also multiplied by
// clip_coefficient(*norm, max_norm) before they are rounded to the dtype. A non-finite norm sets
// found_inf = 1. Grads are neither read nor written then, or if both factors are 1.
struct UnscaleArgs {
  TensorList grads;
  const float* inv_scale;
  float* found_inf;
  const float* norm;  // may be null
  float max_norm;
};

// Sets found_inf = 1 if an element is not finite.
struct CheckFiniteArgs {
  TensorList grads;
  float* found_inf;
};

// Computes output = input, rounded to nearest even into the output's dtype. fp64 converts to 16
// bits by way of fp32, and equal dtypes are copied bit by bit. No output overlaps another output or
// an input.
struct CastArgs {
  CastList casts;
};

// Computes *norm = L2 norm of grads * inv_scale, and sets found_inf = 1 if a product or the norm is
// not finite.
struct GradNormArgs {
  TensorList grads;
  const float* inv_scale;  // null means 1
  float* found_inf;
  float* norm;
};

// The largest number of partial sums of squares in the CUDA and the Triton kernel.
constexpr int kGradNormMaxBlocks = 1024;

}  // namespace amp_ext
