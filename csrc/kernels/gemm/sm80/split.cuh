// Combines the sums of tiles that are split along k, in the workspace.
#pragma once

#include <cstring>

#include "mainloop.cuh"
#include "reduce.cuh"

namespace amp_ext {

// Stores the sums of a block's share. The last block of a tile adds all shares in order, and
// returns true with the total in `sums`. All threads take part.
template <class Gemm>
__device__ bool add_splits(typename Gemm::Sums& sums, bool& shared, const GemmPlan& plan,
                           const GemmWork& work, unsigned char* workspace, uint32_t* tickets) {
  constexpr int kThreads = Gemm::kTile.threads();
  // The workspace interleaves packs of four sums of neighbouring threads.
  constexpr int64_t kPacks = sizeof(typename Gemm::Sums) / sizeof(uint4);
  const auto pack = [&](uint32_t split, int i, int j) {
    const int64_t share = int64_t{work.tile} * plan.splits + split;
    const int64_t index = share * kPacks + i * Gemm::kColumnParts + j;
    return reinterpret_cast<uint4*>(workspace) + index * kThreads + threadIdx.x;
  };
#pragma unroll
  for (int i = 0; i < Gemm::kRowParts; ++i) {
#pragma unroll
    for (int j = 0; j < Gemm::kColumnParts; ++j) {
      uint4 bits;
      memcpy(&bits, sums[i][j], sizeof(bits));
      ptx::store16(pack(work.share, i, j), bits);
    }
  }
  ptx::block_sync();
  if (!is_last_block(tickets + work.tile, plan.splits, shared)) return false;
  memset(sums, 0, sizeof(sums));
  for (uint32_t split = 0; split < plan.splits; ++split) {
#pragma unroll
    for (int i = 0; i < Gemm::kRowParts; ++i) {
#pragma unroll
      for (int j = 0; j < Gemm::kColumnParts; ++j) {
        const uint4 bits = ptx::load_l2(pack(split, i, j));
        float share[4];
        memcpy(share, &bits, sizeof(bits));
#pragma unroll
        for (int d = 0; d < 4; ++d) sums[i][j][d] += share[d];
      }
    }
  }
  return true;
}

}  // namespace amp_ext
