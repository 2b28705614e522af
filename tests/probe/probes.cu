// Assumptions of the executor about grids, TMA and wgmma, each in a kernel of its own. probes.py
// has the expected results of the functions at the end.
//
// These kernels are built for sm_90a alone, and so are not guarded against other architectures.
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <ptx/sm80.cuh>
#include <ptx/sm90.cuh>

#include "tensor_map.cuh"

namespace {

using namespace amp_ext;
using ptx::Major;

struct Grid {
  int blocks;
  int threads;
  size_t shared_bytes = 0;
  bool early = false;  // it need not wait for the grid before
};

template <class... Params, class... Args>
int launch(const Grid& grid, void (*kernel)(Params...), const Args&... args) {
  if (!grid.early) {
    kernel<<<grid.blocks, grid.threads, grid.shared_bytes>>>(args...);
    return cudaGetLastError();
  }
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid.blocks);
  config.blockDim = dim3(grid.threads);
  config.dynamicSmemBytes = grid.shared_bytes;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// ---- grids -------------------------------------------------------------------------------------

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

// ---- TMA ---------------------------------------------------------------------------------------

struct Point {
  int x, y, z;
};

constexpr int kBoxThreads = 64;

struct LoadedBox {
  alignas(1024) uint4 packs[256 + kBoxThreads];
  ptx::Mbarrier full;
};

// Dumps a box of shared memory from pack `first` on.
__global__ void load_box(const CUtensorMap __grid_constant__ map, uint4* to, int first, int packs,
                         Point at) {
  auto& shared = ptx::shared<LoadedBox>();
  uint4* box = shared.packs + first;
  const int bytes = packs * static_cast<int>(sizeof(uint4));
  if (threadIdx.x == 0) {
    ptx::tma_prefetch(map);
    ptx::mbarrier_init(shared.full, 1);
    ptx::fence_mbarrier_init();
  }
  ptx::block_sync();
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect_tx(shared.full, bytes);
    ptx::tma_load(box, map, shared.full, at.x, at.y, at.z);
  }
  ptx::mbarrier_wait(shared.full, 0);
  for (int i = threadIdx.x; i < packs; i += kBoxThreads) to[i] = box[i];
}

struct StoredBox {
  alignas(1024) uint4 packs[kBoxThreads];
};

// Each block stores, or adds, two boxes from the same place in shared memory, to z = 0 and z = 1.
template <bool kAdd>
__global__ void store_boxes(const CUtensorMap __grid_constant__ map, const uint4* from, int x,
                            int y) {
  auto& box = ptx::shared<StoredBox>();
  for (int z = 0; z < 2; ++z) {
    ptx::store_shared(&box.packs[threadIdx.x], from[kBoxThreads * z + threadIdx.x]);
    ptx::fence_proxy_async();
    ptx::block_sync();
    if (threadIdx.x == 0) {
      if constexpr (kAdd)
        ptx::tma_reduce_add(map, &box, x, y, z);
      else
        ptx::tma_store(map, &box, x, y, z);
      ptx::bulk_commit();
      ptx::bulk_wait_read<0>();
    }
    ptx::block_sync();
  }
}

// ---- wgmma -------------------------------------------------------------------------------------

constexpr int kWarpgroup = 128;
constexpr int kSteps = 4;
constexpr int kStepBytes = 32;  // where k is contiguous

struct Operands {
  alignas(1024) uint4 a[1024];
  uint4 b[2048];
};

// How descriptors go through an operand; offsets in bytes.
struct Walk {
  int leading;
  int stride;
  int step;
};

template <class T>
__device__ void copy_to_shared(T& to, const uint4* from) {
  auto* packs = reinterpret_cast<uint4*>(&to);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(T) / sizeof(uint4)); i += kWarpgroup)
    ptx::store_shared(&packs[i], from[i]);
  ptx::fence_proxy_async();
  ptx::block_sync();
}

using Sums = float[64];  // of 64 x 128

__device__ void dump(const Sums& registers, float* to) {
#pragma unroll
  for (int i = 0; i < 64; ++i) to[64 * threadIdx.x + i] = registers[i];
}

// Dumps the sums of 64 products each and the thread's number.
template <Major kA, Major kB>
__global__ void __launch_bounds__(kWarpgroup, 1)
    multiply(const uint4* from, float* to, Walk walk_a, Walk walk_b) {
  auto& operands = ptx::shared<Operands>();
  copy_to_shared(operands, from);
  uint64_t a = ptx::wgmma_descriptor(operands.a, walk_a.leading, walk_a.stride);
  uint64_t b = ptx::wgmma_descriptor(operands.b, walk_b.leading, walk_b.stride);
  Sums d;
  for (float& value : d) value = threadIdx.x;
  ptx::wgmma_fence(d);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    ptx::wgmma<__half, 128, kA, kB>(d, a, b, true);
    a = ptx::wgmma_advance(a, walk_a.step);
    b = ptx::wgmma_advance(b, walk_b.step);
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>(d);
  dump(d, to);
}

struct Stage {
  alignas(1024) uint4 a[512];
  uint4 b[1024];
};

struct Stages {
  Stage at[2];
};

__device__ __forceinline__ void add_stage(Sums& d, const Stage& stage) {
  uint64_t a = ptx::wgmma_descriptor(stage.a, 16, 1024);
  uint64_t b = ptx::wgmma_descriptor(stage.b, 16, 1024);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    ptx::wgmma<__half, 128, Major::k, Major::k>(d, a, b, true);
    a = ptx::wgmma_advance(a, kStepBytes);
    b = ptx::wgmma_advance(b, kStepBytes);
  }
}

// Three groups, two at a time in flight. Once only the last one is pending, the memory that the
// others read can be overwritten, and the sums that they add to be read.
__global__ void __launch_bounds__(kWarpgroup, 1) overlap_groups(const uint4* from, float* to) {
  auto& stages = ptx::shared<Stages>();
  copy_to_shared(stages, from);
  Sums two_stages = {}, third_stage = {};
  ptx::wgmma_fence(two_stages);
  add_stage(two_stages, stages.at[0]);
  ptx::wgmma_commit();
  add_stage(two_stages, stages.at[1]);
  ptx::wgmma_commit();
  ptx::wgmma_wait<1>();
  ptx::block_sync();
  copy_to_shared(stages.at[0], from + sizeof(Stages) / sizeof(uint4));
  ptx::wgmma_fence(third_stage);
  add_stage(third_stage, stages.at[0]);
  ptx::wgmma_commit();
  ptx::wgmma_wait<1>(two_stages);
  dump(two_stages, to);
  ptx::wgmma_wait<0>(third_stage);
  dump(third_stage, to + 64 * kWarpgroup);
}

}  // namespace

extern "C" {

int probe_grids(const uint32_t* from, uint32_t* to, int blocks, int grids, int rounds) {
  int error = 0;
  for (int grid = 0; grid < grids && error == 0; ++grid)
    error = launch({blocks, kGridThreads, 0, grid > 0}, step_on, from, to, grid, rounds);
  return error;
}

// Loads a box of 2 matrices from 3 matrices of 21 x 72 elements of 2 bytes, apart by more.
int probe_tma_load(const void* from, uint4* to, int swizzle, uint32_t columns, int first, int x,
                   int y, int z) {
  constexpr uint32_t kRows = 16, kMatrices = 2;
  CUtensorMap map;
  const int error = encode_tensor_map(
      &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, const_cast<void*>(from), {72, 21, 3}, {160, 24 * 160},
      {columns, kRows, kMatrices}, static_cast<CUtensorMapSwizzle>(swizzle));
  if (error != cudaSuccess) return error;
  const int packs = kMatrices * kRows * columns / 8;
  return launch({1, kBoxThreads, sizeof(LoadedBox)}, load_box, map, to, first, packs,
                Point{x, y, z});
}

// Stores boxes of 8 x 32 to 2 matrices of 13 x 40 FP32 elements, apart by more; or blocks add them.
int probe_tma_store(const uint4* from, void* to, int x, int y, int blocks, int adds) {
  CUtensorMap map;
  const int error =
      encode_tensor_map(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, to, {40, 13, 2},
                        {48 * 4, 16 * 48 * 4}, {32, 8, 1}, CU_TENSOR_MAP_SWIZZLE_128B);
  if (error != cudaSuccess) return error;
  const auto kernel = adds ? store_boxes<true> : store_boxes<false>;
  return launch({blocks, kBoxThreads, sizeof(StoredBox)}, kernel, map, from, x, y);
}

int probe_wgmma_mn_major(const uint4* from, float* to, int a_mn, int b_mn, int leading,
                         int stride) {
  const Walk rows = {16, 1024, kStepBytes}, columns = {leading, stride, 2 * stride};
  constexpr auto k = Major::k, mn = Major::mn;
  const auto kernel = a_mn ? b_mn ? multiply<mn, mn> : multiply<mn, k> : multiply<k, mn>;
  return launch({1, kWarpgroup, sizeof(Operands)}, kernel, from, to, a_mn ? columns : rows,
                b_mn ? columns : rows);
}

int probe_wgmma_groups(const uint4* from, float* to) {
  return launch({1, kWarpgroup, sizeof(Stages)}, overlap_groups, from, to);
}

}  // extern "C"
