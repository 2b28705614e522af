// Reductions over a block.
#pragma once

#include <ptx.cuh>

namespace amp_ext {

template <int kThreads>
struct BlockSum {
  double warp[kThreads / 32];
};

// The sum of `value` over the block, in thread 0, always added in the same order. May be called
// again after a block_sync.
template <int kThreads>
__device__ double block_sum(double value, BlockSum<kThreads>& shared) {
  for (int mask = 16; mask > 0; mask /= 2) value += ptx::shuffle_xor(value, mask);
  if (threadIdx.x % 32 == 0) shared.warp[threadIdx.x / 32] = value;
  ptx::block_sync();
  if (threadIdx.x >= 32) return 0;
  value = threadIdx.x < kThreads / 32 ? shared.warp[threadIdx.x] : 0;
  for (int mask = 16; mask > 0; mask /= 2) value += ptx::shuffle_xor(value, mask);
  return value;
}

}  // namespace amp_ext
