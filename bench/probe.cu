// What the executor of tests/simt assumes of warps, blocks, clusters and mbarriers, each assumption
// in a kernel of its own. probe.py calls the functions at the end and knows what they must give.
//
// These kernels are built for sm_90a alone, and so are not guarded against other architectures.
#include <cuda_runtime.h>

#include <cstdint>
#include <ptx.cuh>
#include <ptx_sm90.cuh>

#include "probe.cuh"

namespace {

using namespace amp_ext;

__device__ int thread_of_grid() { return static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); }

// ---- warps -------------------------------------------------------------------------------------

__global__ void exchange(const uint32_t* from, uint32_t* to, int lane, uint32_t sought) {
  const uint32_t value = from[threadIdx.x];
  to += 6 * threadIdx.x;
  to[0] = ptx::shuffle_xor(value, lane);
  to[1] = static_cast<uint32_t>(ptx::shuffle_xor(static_cast<double>(value), lane));
  to[2] = static_cast<uint32_t>(ptx::shuffle(static_cast<float>(value), lane));
  to[3] = ptx::warp_ballot(value % 2 == 1);
  to[4] = ptx::warp_any(value == sought);
  to[5] = ptx::warp_max(value);
}

// For each of two elections whether a lane was elected, and whether another one was as well.
__global__ void elect(uint32_t* to) {
  const uint32_t first = ptx::warp_ballot(ptx::warp_elect());
  const uint32_t second = ptx::warp_ballot(ptx::warp_elect());
  to += 3 * threadIdx.x;
  to[0] = first != 0;
  to[1] = first & (first - 1);
  to[2] = first ^ second;
}

// ---- memory and copies -------------------------------------------------------------------------

__global__ void copy_through_caches(const uint4* from, uint4* to) {
  const int i = 3 * thread_of_grid();
  ptx::store16(to + i, ptx::load16<ptx::Cache::streaming>(from + i));
  ptx::store16<ptx::Cache::streaming>(to + i + 1, ptx::load16(from + i + 1));
  ptx::store16<ptx::Cache::streaming>(to + i + 2, ptx::load16<ptx::Cache::read_only>(from + i + 2));
}

constexpr int kCopyThreads = 64;

template <int kBytes>
struct alignas(kBytes) Item {
  unsigned char bytes[kBytes];
};

template <int kBytes>
struct Items {
  Item<kBytes> group[2][kCopyThreads];
};

// Each thread copies another number of bytes, and from nowhere where that is 0.
template <int kBytes>
__global__ void copy_parts(const Item<kBytes>* from, Item<kBytes>* to) {
  auto& items = ptx::shared<Items<kBytes>>();
  const int thread = static_cast<int>(threadIdx.x);
  const int bytes = thread % (kBytes + 1);
  for (int group = 0; group < 2; ++group) {
    const auto* item = from + group * kCopyThreads + thread;
    ptx::cp_async<kBytes>(&items.group[group][thread], bytes == 0 ? nullptr : item, bytes);
    ptx::cp_async_commit();
  }
  ptx::cp_async_wait<1>();
  to[thread] = items.group[0][thread];
  ptx::cp_async_wait<0>();
  to[kCopyThreads + thread] = items.group[1][thread];
}

// ---- barriers ----------------------------------------------------------------------------------

constexpr int kHalf = 64;

struct Slots {
  uint32_t at[kHalf];
};

// Half of the block hands numbers to the other half, which reverses them, through one slot each.
__global__ void hand_over(const uint32_t* from, uint32_t* to, int rounds) {
  constexpr int kFull = 1;
  constexpr int kEmpty = 2;
  auto& slots = ptx::shared<Slots>();
  const int thread = static_cast<int>(threadIdx.x) % kHalf;
  const bool produces = threadIdx.x < kHalf;
  for (int i = thread; i < rounds * kHalf; i += kHalf) {
    if (produces) {
      ptx::barrier_sync<kEmpty, 2 * kHalf>();
      ptx::store_shared(&slots.at[thread], from[i]);
      ptx::barrier_arrive<kFull, 2 * kHalf>();
    } else {
      ptx::barrier_arrive<kEmpty, 2 * kHalf>();
      ptx::barrier_sync<kFull, 2 * kHalf>();
      to[i] = slots.at[kHalf - 1 - thread];
    }
  }
}

// What a thread sees before each arrival: a phase that has not completed.
__global__ void count_arrivals(uint32_t* to, int arrivals, int phases) {
  auto& barrier = ptx::shared<ptx::Mbarrier>();
  ptx::mbarrier_init(barrier, arrivals);
  ptx::fence_mbarrier_init();
  ptx::block_sync();
  ptx::mbarrier_wait(barrier, 1);
  for (int i = 0; i < phases * arrivals; ++i) {
    const int parity = i / arrivals % 2;
    *to++ = ptx::mbarrier_try_wait(barrier, parity);
    ptx::mbarrier_arrive(barrier);
    if ((i + 1) % arrivals == 0) ptx::mbarrier_wait(barrier, parity);
  }
  *to = 1;
}

constexpr int kRingThreads = 96;
constexpr int kRingShift = 33;

struct Ring {
  ptx::Mbarrier barrier;
  uint32_t at[2][kRingThreads];
};

// Numbers move from thread to thread, ordered by the phases of an mbarrier alone.
__global__ void rotate(const uint32_t* from, uint32_t* to, int rounds) {
  auto& ring = ptx::shared<Ring>();
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(ring.barrier, kRingThreads);
    ptx::fence_mbarrier_init();
  }
  ptx::block_sync();
  uint32_t value = from[threadIdx.x];
  for (int round = 0; round < rounds; ++round) {
    ptx::store_shared(&ring.at[round % 2][threadIdx.x], value);
    ptx::mbarrier_arrive(ring.barrier);
    ptx::mbarrier_wait(ring.barrier, round % 2);
    value = ring.at[round % 2][(threadIdx.x + kRingShift) % kRingThreads];
  }
  to[threadIdx.x] = value;
}

// ---- clusters ----------------------------------------------------------------------------------

__global__ void name_blocks(uint32_t* to) {
  to[2 * blockIdx.x] = ptx::cluster_rank();
  to[2 * blockIdx.x + 1] = ptx::cluster_size();
}

// How far shared memory is from 1024-byte alignment, and from its address in block 0 of the
// cluster.
__global__ void compare_addresses(uint32_t* to) {
  const uint32_t address = ptx::shared_address(&ptx::shared<uint4>());
  to[2 * blockIdx.x] = address;
  ptx::cluster_sync();
  to[2 * blockIdx.x + 1] = address - to[2 * (blockIdx.x - ptx::cluster_rank())];
  ptx::cluster_sync();
  to[2 * blockIdx.x] = address % 1024;
}

// Each block waits for the threads of the block before it in its cluster, and adds one if the next
// phase has not completed too.
__global__ void arrive_next_door(const uint32_t* from, uint32_t* to) {
  auto& barrier = ptx::shared<ptx::Mbarrier>();
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, static_cast<int>(blockDim.x));
    ptx::fence_mbarrier_init();
  }
  ptx::cluster_sync();
  const int rank = ptx::cluster_rank();
  const int size = ptx::cluster_size();
  const int thread = thread_of_grid();
  ptx::mbarrier_arrive_cluster(barrier, (rank + 1) % size);
  ptx::mbarrier_wait(barrier, 0);
  to[thread] = from[thread] + !ptx::mbarrier_try_wait(barrier, 1);
  ptx::cluster_sync();
}

// ---- grids -------------------------------------------------------------------------------------

// The blocks take turns, the last one first; all of them fit the device at once.
__global__ void take_turns(uint32_t* counter, uint32_t* values) {
  if (threadIdx.x == 0) ptx::wait_acquire(counter, gridDim.x - 1 - blockIdx.x);
  ptx::block_sync();
  values[threadIdx.x] = 3 * values[threadIdx.x] + blockIdx.x;
  ptx::block_sync();
  if (threadIdx.x == 0) ptx::add_release(counter, 1);
}

// Writes late.
__global__ void compute_slowly(const uint32_t* from, uint32_t* to, int steps) {
  ptx::griddepcontrol_launch_dependents();
  uint32_t value = from[thread_of_grid()];
  for (int step = 0; step < steps; ++step) value = 1664525 * value + 1013904223;
  to[thread_of_grid()] = value;
}

__global__ void reverse(const uint32_t* from, uint32_t* to) {
  ptx::griddepcontrol_wait();
  to[thread_of_grid()] = from[gridDim.x * blockDim.x - 1 - thread_of_grid()];
}

// ---- registers ---------------------------------------------------------------------------------

constexpr int kWarpgroup = 128;
constexpr int kPacks = 24;

template <int kCount>
__device__ void load(uint4 (&packs)[kCount], const uint4* from) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) packs[i] = ptx::load16<ptx::Cache::read_only>(from + i);
}

__device__ uint32_t mix(uint32_t sum, uint4 a, uint4 b) {
  return 3 * sum + (a.x ^ b.x) + 5 * (a.y ^ b.y) + 7 * (a.z ^ b.z) + 11 * (a.w ^ b.w);
}

// Two warpgroups hold more registers than a third of the SM's, once the first has given up its own.
__global__ void __launch_bounds__(3 * kWarpgroup, 1)
    move_registers(const uint4* from, uint32_t* to) {
  from += 2 * kPacks * threadIdx.x;
  uint32_t sum = blockIdx.x;
  if (threadIdx.x < kWarpgroup) {
    uint4 kept[2];
    load(kept, from);
    ptx::setmaxnreg_dec<40>();
    sum = mix(sum, kept[0], kept[1]);
  } else {
    uint4 kept[kPacks];
    load(kept, from);
    ptx::setmaxnreg_inc<232>();
    uint4 more[kPacks];
    load(more, from + kPacks);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) sum = mix(sum, kept[i], more[kPacks - 1 - i]);
  }
  to[thread_of_grid()] = sum;
}

}  // namespace

extern "C" {

int probe_warp(const uint32_t* from, uint32_t* to, int lane, int sought) {
  return launch({1, 32}, exchange, from, to, lane, sought);
}

int probe_elect(const void*, uint32_t* to) { return launch({1, 64}, elect, to); }

int probe_caches(const uint4* from, uint4* to) {
  return launch({2, 32}, copy_through_caches, from, to);
}

int probe_cp_async(const void* from, void* to, int bytes) {
  const auto copy = [&](auto kernel, auto* items) {
    using Bytes = std::remove_pointer_t<decltype(items)>;
    return launch({1, kCopyThreads, 2 * kCopyThreads * sizeof(Bytes)}, kernel,
                  static_cast<const Bytes*>(from), items);
  };
  switch (bytes) {
    case 4: return copy(copy_parts<4>, static_cast<Item<4>*>(to));
    case 8: return copy(copy_parts<8>, static_cast<Item<8>*>(to));
    case 16: return copy(copy_parts<16>, static_cast<Item<16>*>(to));
  }
  return cudaErrorInvalidValue;
}

int probe_named_barriers(const uint32_t* from, uint32_t* to, int rounds) {
  return launch({1, 2 * kHalf, sizeof(Slots)}, hand_over, from, to, rounds);
}

int probe_mbarrier_phases(const void*, uint32_t* to, int arrivals, int phases) {
  return launch({1, 1, sizeof(ptx::Mbarrier)}, count_arrivals, to, arrivals, phases);
}

int probe_mbarrier_order(const uint32_t* from, uint32_t* to, int rounds) {
  return launch({1, kRingThreads, sizeof(Ring)}, rotate, from, to, rounds);
}

int probe_mbarrier_remote(const uint32_t* from, uint32_t* to, int blocks, int cluster) {
  constexpr int kThreads = 64;
  return launch({blocks, kThreads, sizeof(ptx::Mbarrier), cluster}, arrive_next_door, from, to);
}

int probe_cluster(const void*, uint32_t* to, int blocks, int cluster) {
  return launch({blocks, 1, 0, cluster}, name_blocks, to);
}

int probe_shared_address(const void*, uint32_t* to, int blocks, int cluster) {
  return launch({blocks, 1, sizeof(uint4), cluster}, compare_addresses, to);
}

int probe_turnstile(const void*, uint32_t* to, int blocks) {
  return launch({blocks, 32}, take_turns, to, to + 1);
}

int probe_dependent_launch(const uint32_t* from, uint32_t* to, int blocks, int steps) {
  constexpr int kThreads = 64;
  const int error = launch({blocks, kThreads}, compute_slowly, from, to, steps);
  if (error != cudaSuccess) return error;
  return launch({blocks, kThreads, 0, 1, true}, reverse, to, to + kThreads * blocks);
}

int probe_setmaxnreg(const uint4* from, uint32_t* to, int blocks) {
  return launch({blocks, 3 * kWarpgroup}, move_registers, from, to);
}

}  // extern "C"
