// Assumptions of the executor about mbarriers and grids, each in a kernel of its own. blocks.py has
// the expected results of the functions at the end.
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

int probe_mbarrier_phases(const void*, uint32_t* to, int arrivals, int phases) {
  return launch({1, 1, sizeof(ptx::Mbarrier)}, count_arrivals, to, arrivals, phases);
}

int probe_grids(const uint32_t* from, uint32_t* to, int blocks, int grids, int rounds) {
  int error = 0;
  for (int grid = 0; grid < grids && error == 0; ++grid)
    error = launch({blocks, kGridThreads, 0, grid > 0}, step_on, from, to, grid, rounds);
  return error;
}

}  // extern "C"
