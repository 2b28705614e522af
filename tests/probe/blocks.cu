// Assumptions of the executor about grids. blocks.py has the expected results of the function at
// the end.
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

int probe_grids(const uint32_t* from, uint32_t* to, int blocks, int grids, int rounds) {
  int error = 0;
  for (int grid = 0; grid < grids && error == 0; ++grid)
    error = launch({blocks, kGridThreads, 0, grid > 0}, step_on, from, to, grid, rounds);
  return error;
}

}  // extern "C"
