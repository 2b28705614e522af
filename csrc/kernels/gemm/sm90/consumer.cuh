// Synchronises the threads of a consumer.
#pragma once

#include "mainloop.cuh"

namespace amp_ext {

// Returns the thread's index in its consumer. Each use recomputes it, to hold no register beside
// the sums.
__device__ inline int consumer_thread() { return ptx::thread_index() % kWarpgroup; }

// Waits for the 128 threads of one consumer and orders their memory accesses.
__device__ inline void consumer_sync(int consumer) {
  static_assert(Sm90Tile::kConsumers == 2);
  if (consumer == 0)
    ptx::barrier_sync<1, kWarpgroup>();
  else
    ptx::barrier_sync<2, kWarpgroup>();
}

// Does for consumers as is_last_block does for blocks.
__device__ inline bool is_last_consumer(uint32_t* ticket, uint32_t consumers, bool& shared,
                                        int consumer) {
  consumer_sync(consumer);
  if (consumer_thread() == 0) {
    ptx::device_fence();
    shared = ptx::ticket(ticket, consumers - 1) == consumers - 1;
    ptx::device_fence();
  }
  consumer_sync(consumer);
  return ptx::warp_uniform(shared);
}

}  // namespace amp_ext
