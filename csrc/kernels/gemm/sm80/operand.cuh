// Operands on their way to the tensor cores: from global memory to shared memory, step by step
// along k, and from there to the fragments of a warp.
#pragma once

#include <cstdint>
#include <ptx/sm80.cuh>

#include "amp_ext/gemm.h"
#include "gemm/plan/tiles.h"
#include "gemm/shared/swizzle.h"

namespace amp_ext {

constexpr int kOperandBytes = 2;  // of an element
constexpr int kOperandChunk = kSwizzleChunkBytes / kOperandBytes;

// A step of an operand in shared memory: kExtent of m or n by kStep of k, in lines that are
// contiguous as in global memory. Lines lie in rows of 128 bytes: short ones share a row, of long
// ones each part of 64 elements is in rows of its own. The chunks of a row are permuted so that
// eight neighbouring lines, the first of them a multiple of eight, have the same chunk in eight
// different places; see swizzle.h.
template <int kExtent, int kStep, Major kMajor>
struct OperandTile {
  static constexpr int kLines = kMajor == Major::k ? kExtent : kStep;
  static constexpr int kLineChunks = (kMajor == Major::k ? kStep : kExtent) / kOperandChunk;
  static constexpr int kRowChunks = kSwizzleRowBytes / kSwizzleChunkBytes;
  static constexpr int kRowLines = kLineChunks < kRowChunks ? kRowChunks / kLineChunks : 1;
  static constexpr int kPartBytes = kLines * kSwizzleRowBytes;
  static constexpr int kEightLinesBytes = 8 / kRowLines * kSwizzleRowBytes;

  alignas(kSwizzleAlignment) unsigned char bytes[kExtent * kStep * kOperandBytes];

  // The offset of a chunk. Eight lines on it is larger by kEightLinesBytes; an even number of
  // chunks on, within a row's eight, it differs in the bits of that number.
  __device__ static int offset(int line, int chunk) {
    const int row = line / kRowLines;
    const int in_row = line % kRowLines * kLineChunks + chunk % kRowChunks;
    return chunk / kRowChunks * kPartBytes + row * kSwizzleRowBytes +
           (in_row ^ row % (8 / kRowLines)) * kSwizzleChunkBytes;
  }
};

// Two fragments of 16x8 elements of b, or one of 16x16 of a.
using Fragment = uint32_t[4];

enum class Role { a, b };

// A warp's reads of an operand's fragments.
template <Role kRole, int kExtent, int kStep, Major kMajor>
class FragmentReader {
 public:
  using Tile = OperandTile<kExtent, kStep, kMajor>;

  // For fragments from `mn` of m or n on, a multiple of the warp's part of the tile.
  __device__ explicit FragmentReader(int mn) {
    // A fragment is four matrices of 8x8: the halves of m or n and of k, in the order of mma's
    // registers.
    const int lane = threadIdx.x % 32;
    const int matrix = lane / 8, row = lane % 8;
    const int mn_half = kRole == Role::a ? matrix % 2 : matrix / 2;
    const int k_half = kRole == Role::a ? matrix / 2 : matrix % 2;
    offset_ = kMajor == Major::k ? Tile::offset(mn + mn_half * 8 + row, k_half)
                                 : Tile::offset(k_half * 8 + row, mn / 8 + mn_half);
  }

  // Reads fragment `i` of the warp's part, of 16 of m or n, for `depth`, the 16 of k. All lanes
  // take part.
  __device__ void read(Fragment& fragment, const Tile& tile, int i, int depth) const {
    const int lines = kMajor == Major::k ? i : depth, chunks = kMajor == Major::k ? depth : i;
    const int offset =
        (offset_ ^ chunks * 2 * kSwizzleChunkBytes) + lines * 2 * Tile::kEightLinesBytes;
    ptx::ldmatrix<kMajor == Major::mn>(fragment, tile.bytes + offset);
  }

 private:
  int offset_;
};

// One operand as a block walks through it along k, step by step, and on from matrix to matrix: a
// thread's chunks of each step.
template <int kExtent, int kStep, Major kMajor, int kThreads>
class OperandWalk {
 public:
  using Tile = OperandTile<kExtent, kStep, kMajor>;

  // Begins at `first` of m or n, of which there are `extent`, and at `k` of this matrix. Of the
  // strides of m or n and of k, only that between lines counts.
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

  // Goes from the last of a matrix's steps to the first one of the next matrix.
  __device__ void advance_matrix(int steps) { at_ += matrix_stride_ - (steps - 1) * step_stride(); }

  // Copies a step, of which `depth` of k exist. What is outside of the matrix becomes zero: it adds
  // nothing. Aligned operands are copied asynchronously.
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
  // In each pass the block's threads copy whole lines, a multiple of eight of them.
  static constexpr int kLineChunks = Tile::kLineChunks;
  static constexpr int kPassLines = kThreads / kLineChunks;
  static constexpr int kPasses = Tile::kLines / kPassLines;
  static_assert(kPassLines % 8 == 0 && Tile::kLines % kPassLines == 0);

  // Read anew, to hold no registers between steps.
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
