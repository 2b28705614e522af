// Moves operands from global to shared memory, step by step along k, and from there to fragments.
#pragma once

#include <cstdint>
#include <ptx/sm80.cuh>

#include "amp_ext/gemm.h"
#include "gemm/plan/tiles.h"
#include "gemm/shared/swizzle.h"

namespace amp_ext {

constexpr int kOperandBytes = 2;  // of an element
constexpr int kOperandChunk = kSwizzleChunkBytes / kOperandBytes;

// A step of an operand in shared memory: kExtent of m or n by kStep of k, in contiguous lines as in
// global memory. Lines lie in rows of 128 bytes. Short lines share a row; each 64 elements of a
// long line have rows of their own. Chunks are permuted within a row, so that equal chunks of eight
// neighbouring lines, the first a multiple of eight, are in eight different places; see swizzle.h.
template <int kExtent, int kStep, Major kMajor>
struct OperandTile {
  static constexpr int kLines = kMajor == Major::k ? kExtent : kStep;
  static constexpr int kLineChunks = (kMajor == Major::k ? kStep : kExtent) / kOperandChunk;
  static constexpr int kRowChunks = kSwizzleRowBytes / kSwizzleChunkBytes;
  static constexpr int kRowLines = kLineChunks < kRowChunks ? kRowChunks / kLineChunks : 1;
  static constexpr int kPartBytes = kLines * kSwizzleRowBytes;
  static constexpr int kEightLinesBytes = 8 / kRowLines * kSwizzleRowBytes;

  alignas(kSwizzleAlignment) unsigned char bytes[kExtent * kStep * kOperandBytes];

  // Returns the byte offset of a chunk. Eight lines further the offset is larger by
  // kEightLinesBytes. An even number of chunks further, within a row's eight, it differs by an
  // exclusive or with that number.
  __device__ static int offset(int line, int chunk) {
    const int row = line / kRowLines;
    const int in_row = line % kRowLines * kLineChunks + chunk % kRowChunks;
    return chunk / kRowChunks * kPartBytes + row * kSwizzleRowBytes +
           (in_row ^ row % (8 / kRowLines)) * kSwizzleChunkBytes;
  }
};

// Two 16x8 fragments of b, or one 16x16 fragment of a.
using Fragment = uint32_t[4];

enum class Role { a, b };

// Reads an operand's fragments into a warp.
template <Role kRole, int kExtent, int kStep, Major kMajor>
class FragmentReader {
 public:
  using Tile = OperandTile<kExtent, kStep, kMajor>;

  // Reads fragments from index `mn` of m or n, a multiple of the warp's part of the tile.
  __device__ explicit FragmentReader(int mn) {
    // A fragment is four 8x8 matrices: the halves of m or n and of k, in the order of mma's
    // registers.
    const int lane = threadIdx.x % 32;
    const int matrix = lane / 8, row = lane % 8;
    const int mn_half = kRole == Role::a ? matrix % 2 : matrix / 2;
    const int k_half = kRole == Role::a ? matrix / 2 : matrix % 2;
    offset_ = kMajor == Major::k ? Tile::offset(mn + mn_half * 8 + row, k_half)
                                 : Tile::offset(k_half * 8 + row, mn / 8 + mn_half);
  }

  // Reads fragment `i` of 16 of m or n, for the 16 of k with index `depth`. All lanes take part.
  __device__ void read(Fragment& fragment, const Tile& tile, int i, int depth) const {
    const int lines = kMajor == Major::k ? i : depth, chunks = kMajor == Major::k ? depth : i;
    const int offset =
        (offset_ ^ chunks * 2 * kSwizzleChunkBytes) + lines * 2 * Tile::kEightLinesBytes;
    ptx::ldmatrix<kMajor == Major::mn>(fragment, tile.bytes + offset);
  }

 private:
  int offset_;
};

// Walks an operand along k, and on from matrix to matrix. Each thread copies its chunks of each
// step.
template <int kExtent, int kStep, Major kMajor, int kThreads>
class OperandWalk {
 public:
  using Tile = OperandTile<kExtent, kStep, kMajor>;

  // Begins at `first` of `extent` indices of m or n, and at index `k` of the matrix. The stride
  // between lines is used, the other one is 1.
  __device__ OperandWalk(const MatrixRef& operand, int64_t mn_stride, int64_t k_stride,
                         int64_t first, int64_t extent, int64_t matrix, int64_t k)
      : matrix_stride_(operand.batch_stride),
        line_stride_(kMajor == Major::k ? mn_stride : k_stride),
        extent_(static_cast<int>(extent - first < kExtent ? extent - first : kExtent)) {
    const int64_t line = (kMajor == Major::k ? first : k) + own_line();
    const int64_t column = (kMajor == Major::k ? k : first) + own_chunk() * kOperandChunk;
    at_ = static_cast<const uint16_t*>(ptx::global(operand.data)) + matrix * matrix_stride_ +
          line * line_stride_ + column;
  }

  __device__ void advance() { at_ += step_stride(); }

  // Moves from a matrix's last step to the first step of the next matrix.
  __device__ void advance_matrix(int steps) { at_ += matrix_stride_ - (steps - 1) * step_stride(); }

  // Copies a step with `depth` valid indices of k. Elements outside the matrix become zero. Aligned
  // operands are copied asynchronously.
  template <bool kAligned>
  __device__ void fetch(Tile& tile, int depth) const {
    const int lines = (kMajor == Major::k ? extent_ : depth) - own_line();
    const int length = (kMajor == Major::k ? depth : extent_) - own_chunk() * kOperandChunk;
    const int elements = length < 0 ? 0 : length < kOperandChunk ? length : kOperandChunk;
    unsigned char* const to = tile.bytes + Tile::offset(own_line(), own_chunk());
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int inside = i * kPassLines < lines ? elements : 0;
      const uint16_t* const from = at_ + i * kPassLines * line_stride_;
      unsigned char* const chunk = to + i * kPassLines / 8 * Tile::kEightLinesBytes;
      if constexpr (kAligned) {
        ptx::cp_async16(chunk, from, inside * kOperandBytes);
      } else {
        ptx::store_shared(reinterpret_cast<uint4*>(chunk), load_elements(from, inside));
      }
    }
  }

 private:
  // Each pass copies whole lines, a multiple of eight of them.
  static constexpr int kLineChunks = Tile::kLineChunks;
  static constexpr int kPassLines = kThreads / kLineChunks;
  static constexpr int kPasses = Tile::kLines / kPassLines;
  static_assert(kPassLines % 8 == 0 && Tile::kLines % kPassLines == 0);

  // Recomputed, to hold no registers between steps.
  __device__ static int own_line() { return ptx::thread_index() / kLineChunks; }
  __device__ static int own_chunk() { return ptx::thread_index() % kLineChunks; }

  __device__ int64_t step_stride() const {
    return kMajor == Major::k ? kStep : kStep * line_stride_;
  }

  __device__ static uint4 load_elements(const uint16_t* from, int elements) {
    uint32_t pairs[4] = {};
#pragma unroll
    for (int i = 0; i < kOperandChunk; ++i)
      if (i < elements) pairs[i / 2] |= static_cast<uint32_t>(from[i]) << i % 2 * 16;
    return {pairs[0], pairs[1], pairs[2], pairs[3]};
  }

  const int64_t matrix_stride_;
  const int64_t line_stride_;
  const int extent_;
  const uint16_t* at_;
};

}  // namespace amp_ext
