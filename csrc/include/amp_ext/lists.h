// The arguments of the ops on lists of tensors, one plain struct an op, and a list as a table of
// chunks of equal size, the unit of work of every multi-tensor kernel.
//
// Pointers are device pointers for the CUDA and Triton kernels and host pointers for a CPU's,
// except where a comment says otherwise.
#pragma once

#include <cstdint>
#include <type_traits>

#include "amp_ext/dtype.h"
#include "amp_ext/status.h"

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

// What the CUDA kernels divide among blocks, so that these have as much to do as each other.
constexpr int kPieceElements = 2048;
constexpr uint32_t kChunkPieces = kChunkElements / kPieceElements;

// A ref, packed, and where its chunks begin in the flattened list. One without elements owns no
// chunk. There is no padding: equal tables, which need not be sent again, have equal bytes.
struct ChunkEntry {
  void* data;
  int64_t numel;
  uint32_t first_chunk;
  DType dtype;
  uint8_t zeros[3] = {};
};

struct CastEntry {
  void* output;
  const void* input;
  int64_t numel;
  uint32_t first_chunk;
  DType output_dtype;
  DType input_dtype;
  uint8_t zeros[2] = {};
};

static_assert(std::has_unique_object_representations_v<ChunkEntry> &&
              std::has_unique_object_representations_v<CastEntry>);

constexpr ChunkEntry entry_of(const TensorRef& t, uint32_t first_chunk) {
  return {t.data, t.numel, first_chunk, t.dtype};
}

constexpr CastEntry entry_of(const CastRef& t, uint32_t first_chunk) {
  return {t.output, t.input, t.numel, first_chunk, t.output_dtype, t.input_dtype};
}

template <class Ref>
using EntryOf = decltype(entry_of(Ref{}, 0));

// A list of tensors, or of tensors that belong together. `refs` is host memory.
template <class Ref>
struct ListOf {
  const Ref* refs = nullptr;
  int64_t size = 0;
};

// Writes one entry per ref; *chunks receives the number of chunks of the whole list.
template <class Ref>
Status build_chunk_table(const ListOf<Ref>& list, EntryOf<Ref>* entries, uint32_t* chunks) {
  int64_t next = 0;
  for (int64_t i = 0; i < list.size; ++i) {
    entries[i] = entry_of(list.refs[i], static_cast<uint32_t>(next));
    next += chunk_count(list.refs[i].numel);
    if (next > UINT32_MAX / kChunkPieces) return Status::too_many_chunks;
  }
  *chunks = static_cast<uint32_t>(next);
  return Status::ok;
}

using TensorList = ListOf<TensorRef>;
using CastList = ListOf<CastRef>;

// grads *= inv_scale; found_inf = 1 if a product is not finite. Nothing is written to grads when
// inv_scale is 1.
//
// With a norm, that of grads * inv_scale, the products are multiplied by clip_coefficient(*norm,
// max_norm) before they are rounded to the dtype. When the norm is not finite, found_inf = 1; then,
// and when both factors are 1, grads are neither read nor written.
struct UnscaleArgs {
  TensorList grads;
  const float* inv_scale;
  float* found_inf;
  const float* norm;  // may be null
  float max_norm;
};

// found_inf = 1 if an element is not finite.
struct CheckFiniteArgs {
  TensorList grads;
  float* found_inf;
};

// output = input, rounded to nearest even into the output's dtype; by way of fp32 from fp64 to 16
// bits. Equal dtypes are copied bit by bit. No output overlaps another output or any input.
struct CastArgs {
  CastList casts;
};

// *norm = L2 norm of grads * inv_scale, norms[i] = that of tensor i alone, found_inf = 1 if a
// product or the norm is not finite.
struct GradNormArgs {
  TensorList grads;
  const float* inv_scale;  // may be null: 1
  float* found_inf;
  float* norm;
  float* norms;  // may be null
};

// How many sums of squares, of parts of the list, the CUDA and the Triton kernel need memory for.
constexpr int kGradNormMaxBlocks = 1024;
inline int64_t partial_sum_count(const GradNormArgs& args) {
  return kGradNormMaxBlocks + (args.norms ? args.grads.size : 0);
}

}  // namespace amp_ext
