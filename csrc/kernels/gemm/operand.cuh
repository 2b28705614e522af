// Operands on their way to the tensor cores: from global memory to shared memory, step by step along
// k, and from there to the fragments of a warp.
#pragma once

#include <cstdint>
#include <cstring>
#include <ptx.cuh>

#include "amp_ext/gemm_tiles.h"
#include "amp_ext/launch.h"
#include "amp_ext/swizzle.h"

namespace amp_ext {

constexpr int kOperandBytes = 2;  // of an element
constexpr int kOperandChunk = kSwizzleChunkBytes / kOperandBytes;

// Sixteen by sixteen elements: registers 0 and 2 hold both halves of k for the first eight of m or
// n, registers 1 and 3 those for the last eight.
using Fragment = uint32_t[4];

// A step of an operand in shared memory: kExtent of m or n by kStep of k, in lines that are
// contiguous as in global memory. Short lines share a row of the swizzle; of long ones each part of
// 64 elements is in a block of rows of its own.
template <int kExtent, int kStep, Major kMajor>
struct OperandTile {
  static constexpr int kLines = kMajor == Major::k ? kExtent : kStep;
  static constexpr int kLineChunks = (kMajor == Major::k ? kStep : kExtent) / kOperandChunk;
  static constexpr int kRowChunks = kSwizzleRowBytes / kSwizzleChunkBytes;

  unsigned char bytes[kExtent * kStep * kOperandBytes];

  __device__ unsigned char* chunk(int line, int i) {
    if constexpr (kLineChunks >= kRowChunks) {
      const int part = i / kRowChunks * kLines * kSwizzleRowBytes;
      return bytes + part + swizzled(line, i % kRowChunks);
    } else {
      constexpr int kRowLines = kRowChunks / kLineChunks;
      return bytes + swizzled(line / kRowLines, line % kRowLines * kLineChunks + i);
    }
  }

  // The elements from `mn` of m or n and `k` of k on. All lanes take part.
  __device__ void load(Fragment& fragment, int mn, int k) {
    const int lane = threadIdx.x % 32;
    // Of the four matrices of 8x8: the upper and lower half of m or n, then both for the next k.
    const int mn_half = lane / 8 % 2, k_half = lane / 16;
    if constexpr (kMajor == Major::k) {
      ptx::ldmatrix<false>(fragment, chunk(mn + mn_half * 8 + lane % 8, k / 8 + k_half));
    } else {
      ptx::ldmatrix<true>(fragment, chunk(k + k_half * 8 + lane % 8, mn / 8 + mn_half));
    }
  }
};

// One operand as a block walks through it along k. `mn_stride` and `k_stride` are those of m or n
// and of k, of which only that between lines counts.
template <int kExtent, int kStep, Major kMajor>
class OperandWalk {
 public:
  using Tile = OperandTile<kExtent, kStep, kMajor>;

  __device__ OperandWalk(const MatrixRef& operand, int64_t mn_stride, int64_t k_stride,
                         int64_t first, int64_t extent)
      : operand_(operand),
        line_stride_(kMajor == Major::k ? mn_stride : k_stride),
        first_(first),
        extent_(static_cast<int>(extent - first < kExtent ? extent - first : kExtent)) {}

  // Goes to an index of k in a matrix of the batch.
  __device__ void go_to(int64_t matrix, int64_t k) {
    const int64_t line = kMajor == Major::k ? first_ : k, column = kMajor == Major::k ? k : first_;
    at_ = static_cast<const uint16_t*>(ptx::global(operand_.data)) +
          matrix * operand_.batch_stride + line * line_stride_ + column;
  }

  __device__ void advance() { at_ += kMajor == Major::k ? kStep : kStep * line_stride_; }

  // Copies a step, of which `depth` of k exist. What is outside of the matrix becomes zero: it adds
  // nothing. Aligned operands are copied asynchronously.
  template <int kThreads, bool kAligned>
  __device__ void fetch(Tile& tile, int depth) const {
    constexpr int kChunks = Tile::kLines * Tile::kLineChunks;
    const int lines = kMajor == Major::k ? extent_ : depth;
    const int length = kMajor == Major::k ? depth : extent_;
#pragma unroll
    for (int first = 0; first < kChunks; first += kThreads) {
      const int i = first + threadIdx.x;
      if (kChunks % kThreads != 0 && i >= kChunks) break;
      const int line = i / Tile::kLineChunks, chunk = i % Tile::kLineChunks;
      const int left = line < lines ? length - chunk * kOperandChunk : 0;
      const int elements = left < 0 ? 0 : left < kOperandChunk ? left : kOperandChunk;
      const uint16_t* from = at_ + line * line_stride_ + chunk * kOperandChunk;
      if constexpr (kAligned) {
        ptx::cp_async<16>(tile.chunk(line, chunk), from, elements * kOperandBytes);
      } else {
        ptx::store_shared(reinterpret_cast<uint4*>(tile.chunk(line, chunk)),
                          load_elements(from, elements));
      }
    }
  }

 private:
  __device__ static uint4 load_elements(const uint16_t* from, int elements) {
    uint32_t pairs[4] = {};
#pragma unroll
    for (int i = 0; i < kOperandChunk; ++i)
      if (i < elements) pairs[i / 2] |= static_cast<uint32_t>(from[i]) << i % 2 * 16;
    return {pairs[0], pairs[1], pairs[2], pairs[3]};
  }

  const MatrixRef& operand_;
  const int64_t line_stride_;
  const int64_t first_;
  const int extent_;
  const uint16_t* at_ = nullptr;
};

}  // namespace amp_ext
