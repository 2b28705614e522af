// Assumptions of the executor about warps, blocks and mbarriers, each in a kernel of its
// own. blocks.py has the expected results of the functions at the end.
//
// These kernels are built for sm_90a alone, and so are not guarded against other architectures.
#include <cuda_runtime.h>

#include <cstdint>
#include <ptx/sm80.cuh>
#include <ptx/sm90.cuh>

#include "launch.cuh"

namespace {

using namespace amp_ext;

__device__ int thread_of_grid() { return static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); }

// ---- warps -------------------------------------------------------------------------------------

__global__ void exchange(const uint32_t* from, uint32_t* to, int lane, uint32_t sought) {
  const uint32_t value = from[threadIdx.x];
  to += 3 * threadIdx.x;
  to[0] = ptx::shuffle_xor(value, lane);
  to[1] = static_cast<uint32_t>(ptx::shuffle_xor(static_cast<double>(value), lane));
  to[2] = ptx::warp_any(value == sought);
}

// How many lanes of the warp are elected, and how many of them only once of twice.
__global__ void elect(uint32_t* to) {
  const int first = ptx::warp_elect(), second = ptx::warp_elect();
  int elected = first, changed = first ^ second;
  for (int mask = 16; mask > 0; mask /= 2) {
    elected += ptx::shuffle_xor(elected, mask);
    changed += ptx::shuffle_xor(changed, mask);
  }
  to[2 * threadIdx.x] = elected;
  to[2 * threadIdx.x + 1] = changed;
}

// ---- memory and copies -------------------------------------------------------------------------

constexpr int kCopyThreads = 64;

struct Items {
  uint4 group[2][kCopyThreads];
};

// Each thread copies another number of bytes, and from nowhere where that is 0.
__global__ void copy_parts(const uint4* from, uint4* to) {
  auto& items = ptx::shared<Items>();
  const int thread = static_cast<int>(threadIdx.x);
  const int bytes = thread % 17;
  for (int group = 0; group < 2; ++group) {
    const uint4* item = from + group * kCopyThreads + thread;
    ptx::cp_async16(&items.group[group][thread], bytes == 0 ? nullptr : item, bytes);
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
  uint32_t at[2][kHalf];
};

// Each half of the block reverses its numbers, behind a barrier of its own: the second half has
// twice as many.
__global__ void reverse_halves(const uint32_t* from, uint32_t* to, int rounds) {
  auto& slots = ptx::shared<Slots>();
  const int thread = static_cast<int>(threadIdx.x) % kHalf;
  const int half = static_cast<int>(threadIdx.x) / kHalf;
  const auto sync = [=] { half ? ptx::barrier_sync<2, kHalf>() : ptx::barrier_sync<1, kHalf>(); };
  from += half * rounds * kHalf;
  to += half * rounds * kHalf;
  for (int i = thread; i < (1 + half) * rounds * kHalf; i += kHalf) {
    ptx::store_shared(&slots.at[half][thread], from[i]);
    sync();
    to[i] = slots.at[half][kHalf - 1 - thread];
    sync();
  }
}

// Write a thread's state before each arrival: an incomplete phase.
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

// ---- registers ---------------------------------------------------------------------------------

constexpr int kWarpgroup = 128;
constexpr int kPacks = 24;

// Loads that stay on their side of setmaxnreg.
template <int kCount>
__device__ void load(uint4 (&packs)[kCount], const uint4* from) {
  const auto* words = reinterpret_cast<const volatile uint32_t*>(from);
#pragma unroll
  for (int i = 0; i < kCount; ++i, words += 4)
    packs[i] = make_uint4(words[0], words[1], words[2], words[3]);
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

// ---- grids -------------------------------------------------------------------------------------

constexpr int kGridThreads = 64;

// Step each number on, slowly. The first grid reads the numbers of `from`; each later grid reads
// the previous grid's results, written by another block.
__global__ void step_on(const uint32_t* from, uint32_t* to, int grid, int rounds) {
  ptx::let_next_grid_begin();
  ptx::wait_for_previous_grid();
  const int thread = thread_of_grid(), last = static_cast<int>(gridDim.x * blockDim.x) - 1;
  const int i = grid % 2 ? last - thread : thread;
  uint32_t x = grid == 0 ? from[i] : ptx::load_l2(&to[i]);
  for (int round = 0; round < rounds; ++round) x = x * (x | 1) + 1;
  to[i] = x;
}

}  // namespace

extern "C" {

int probe_warp(const uint32_t* from, uint32_t* to, int lane, int sought) {
  return launch({1, 32}, exchange, from, to, lane, sought);
}

int probe_elect(const void*, uint32_t* to) { return launch({1, 64}, elect, to); }

int probe_cp_async(const uint4* from, uint4* to) {
  return launch({1, kCopyThreads, sizeof(Items)}, copy_parts, from, to);
}

int probe_named_barriers(const uint32_t* from, uint32_t* to, int rounds) {
  return launch({1, 2 * kHalf, sizeof(Slots)}, reverse_halves, from, to, rounds);
}

int probe_mbarrier_phases(const void*, uint32_t* to, int arrivals, int phases) {
  return launch({1, 1, sizeof(ptx::Mbarrier)}, count_arrivals, to, arrivals, phases);
}

int probe_mbarrier_order(const uint32_t* from, uint32_t* to, int rounds) {
  return launch({1, kRingThreads, sizeof(Ring)}, rotate, from, to, rounds);
}

int probe_grids(const uint32_t* from, uint32_t* to, int blocks, int grids, int rounds) {
  int error = 0;
  for (int grid = 0; grid < grids && error == 0; ++grid)
    error = launch({blocks, kGridThreads, 0, grid > 0}, step_on, from, to, grid, rounds);
  return error;
}

int probe_setmaxnreg(const uint4* from, uint32_t* to, int blocks) {
  return launch({blocks, 3 * kWarpgroup}, move_registers, from, to);
}

}  // extern "C"
