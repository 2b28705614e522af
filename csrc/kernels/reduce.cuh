// Reduces values over a block, and over the grid in its last block.
#pragma once

#include <cstdint>
#include <ptx/common.cuh>

namespace amp_ext {

// Returns the sum of `value` over the warp in every lane, added in a fixed order.
__device__ inline double warp_sum(double value) {
  for (int mask = 16; mask > 0; mask /= 2) value += ptx::shuffle_xor(value, mask);
  return value;
}

template <int kThreads>
struct BlockSum {
  double warp[kThreads / 32];
};

// Returns the sum of `value` over the block in thread 0, added in a fixed order. Another call needs
// a block_sync before it.
template <int kThreads>
__device__ double block_sum(double value, BlockSum<kThreads>& shared) {
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) shared.warp[threadIdx.x / 32] = value;
  ptx::block_sync();
  if (threadIdx.x >= 32) return 0;
  return warp_sum(threadIdx.x < kThreads / 32 ? shared.warp[threadIdx.x] : 0);
}

// Returns true in all threads of the last of `blocks` blocks to draw a ticket, and resets the
// counter to 0. The last block sees the earlier writes of thread 0 of each block, and all writes
// that a block_sync ordered before the call. All threads of the block must call it.
__device__ inline bool is_last_block(uint32_t* tickets, uint32_t blocks, bool& shared) {
  if (threadIdx.x == 0) {
    ptx::device_fence();
    shared = ptx::ticket(tickets, blocks - 1) == blocks - 1;
    ptx::device_fence();
  }
  ptx::block_sync();
  return shared;
}

}  // namespace amp_ext
