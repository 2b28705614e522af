// Kernels with a deliberate fault in their use of Hopper's instructions: test_simt_faults.py looks
// at the reports.
#include <cuda_runtime.h>

#include <ptx/sm90.cuh>

#include "tensor_map.cuh"

namespace {

using namespace amp_ext;
using ptx::Major;

constexpr int kCluster = 2;
constexpr int kFloats = 128;  // of the tensor and of its only box
constexpr int kBytes = kFloats * sizeof(float);

struct Shared {
  alignas(1024) float box[kFloats];
  alignas(1024) uint16_t a[64][64], b[128][64];
  ptx::Mbarrier barrier;
};

__device__ Shared& shared() { return ptx::shared<Shared>(); }

__device__ void init(int arrivals) {
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(shared().barrier, arrivals);
    ptx::fence_mbarrier_init();
  }
  ptx::cluster_sync();
}

// ---- proxies and copies ------------------------------------------------------------------------

__device__ void store(const CUtensorMap& map) { ptx::tma_store(map, shared().box, 0, 0, 0); }

__global__ void stores_what_is_not_fenced(float*, const CUtensorMap __grid_constant__ map) {
  ptx::store_shared(&shared().box[threadIdx.x], 1.0f);
  if (threadIdx.x / 4 != 5) ptx::fence_proxy_async();
  ptx::block_sync();
  if (threadIdx.x != 0) return;
  store(map);
  ptx::bulk_commit();
  ptx::bulk_wait_read<0>();
}

__global__ void exits_with_a_store(float*, const CUtensorMap __grid_constant__ map) {
  if (threadIdx.x != 0) return;
  store(map);
  ptx::bulk_commit();
}

__global__ void overwrites_a_store(float*, const CUtensorMap __grid_constant__ map) {
  const auto write = [](float value) {
    ptx::store_shared(&shared().box[threadIdx.x], value);
    ptx::fence_proxy_async();
    ptx::block_sync();
  };
  write(1.0f);
  if (threadIdx.x == 0) {
    store(map);
    ptx::bulk_commit();
  }
  ptx::block_sync();
  write(2.0f);
  if (threadIdx.x == 0) ptx::bulk_wait_read<0>();
}

__device__ void load(const CUtensorMap& map, int expected_bytes) {
  ptx::mbarrier_arrive_expect_tx(shared().barrier, expected_bytes);
  ptx::tma_load(shared().box, map, shared().barrier, 0, 0, 0);
}

__global__ void does_not_wait_for_a_load(float*, const CUtensorMap __grid_constant__ map) {
  init(1);
  if (threadIdx.x == 0) load(map, kBytes);
}

// ---- mbarriers ---------------------------------------------------------------------------------

__global__ void no_init(float*, const CUtensorMap __grid_constant__) {
  ptx::mbarrier_arrive(shared().barrier);
}

__global__ void two_inits(float*, const CUtensorMap __grid_constant__) {
  init(1);
  init(1);
}

__global__ void no_fence_of_the_init(float*, const CUtensorMap __grid_constant__ map) {
  if (threadIdx.x == 0) ptx::mbarrier_init(shared().barrier, 1);
  ptx::block_sync();
  if (threadIdx.x == 32) load(map, kBytes);
}

__global__ void arrives_too_often(float*, const CUtensorMap __grid_constant__) {
  init(1);
  if (threadIdx.x != 0) return;
  ptx::mbarrier_arrive_expect_tx(shared().barrier, 16);
  ptx::mbarrier_arrive(shared().barrier);
}

template <int kExpected>
__global__ void expects_other_bytes(float*, const CUtensorMap __grid_constant__ map) {
  init(1);
  if (threadIdx.x == 0) load(map, kExpected);
  ptx::mbarrier_wait(shared().barrier, 0);
}

__global__ void overwrites_an_mbarrier(float*, const CUtensorMap __grid_constant__) {
  init(1);
  if (threadIdx.x == 0) shared().barrier.opaque = 0;
  ptx::mbarrier_wait(shared().barrier, 0);
}

// ---- clusters ----------------------------------------------------------------------------------

__global__ void arrives_at_an_exited_block(float*, const CUtensorMap __grid_constant__) {
  init(1);
  if (ptx::cluster_rank() == 1) return;
  for (int i = 0; i < 2000; ++i) ptx::warp_sync();
  if (threadIdx.x == 0) ptx::mbarrier_arrive_cluster(shared().barrier, 1);
}

__global__ void arrives_outside(float*, const CUtensorMap __grid_constant__) {
  init(1);
  ptx::mbarrier_arrive_cluster(shared().barrier, kCluster);
}

__global__ void multicasts_outside(float*, const CUtensorMap __grid_constant__ map) {
  init(1);
  if (threadIdx.x == 0)
    ptx::tma_load_multicast(shared().box, map, shared().barrier, 0, 0, 0, 0b101);
}

// ---- collectives -------------------------------------------------------------------------------

__global__ void barrier_counts_differ(float*, const CUtensorMap __grid_constant__) {
  if (threadIdx.x < 32)
    ptx::barrier_sync<1, 64>();
  else
    ptx::barrier_sync<1, 96>();
}

__global__ void too_many_registers(float*, const CUtensorMap __grid_constant__) {
  ptx::setmaxnreg_inc<232>();
}

__global__ void registers_the_wrong_way(float*, const CUtensorMap __grid_constant__) {
  ptx::setmaxnreg_dec<240>();
}

// ---- wgmma -------------------------------------------------------------------------------------

__device__ uint64_t descriptor(const void* tile) { return ptx::wgmma_descriptor(tile, 16, 1024); }

using Sums = float[64];

__device__ void multiply(Sums& d, int offset = 0) {
  ptx::wgmma<__half, 128, Major::k, Major::k>(d, ptx::wgmma_advance(descriptor(shared().a), offset),
                                              descriptor(shared().b), false);
}

__device__ void zero_operands() {
  for (int i = threadIdx.x; i < 128 * 64; i += blockDim.x) {
    ptx::store_shared(&shared().b[0][0] + i, uint16_t{0});
    if (i < 64 * 64) ptx::store_shared(&shared().a[0][0] + i, uint16_t{0});
  }
  ptx::fence_proxy_async();
  ptx::block_sync();
}

__global__ void multiplies_what_is_not_fenced(float*, const CUtensorMap __grid_constant__) {
  zero_operands();
  if (threadIdx.x == 70) ptx::store_shared(&shared().b[1][0], uint16_t{1});
  ptx::block_sync();
  Sums d;
  ptx::wgmma_fence(d);
  multiply(d);
}

__global__ void no_wgmma_fence(float*, const CUtensorMap __grid_constant__) {
  zero_operands();
  Sums d;
  multiply(d);
}

__global__ void descriptors_differ(float*, const CUtensorMap __grid_constant__) {
  zero_operands();
  Sums d;
  ptx::wgmma_fence(d);
  multiply(d, threadIdx.x < 96 ? 0 : 32);
}

__global__ void no_warpgroup(float*, const CUtensorMap __grid_constant__) {
  Sums d;
  ptx::wgmma_fence(d);
}

__global__ void descriptor_outside(float*, const CUtensorMap __grid_constant__) {
  zero_operands();
  Sums d;
  ptx::wgmma_fence(d);
  multiply(d, 1024 * 64);
}

__global__ void exits_with_a_wgmma(float*, const CUtensorMap __grid_constant__) {
  zero_operands();
  Sums d;
  ptx::wgmma_fence(d);
  multiply(d);
  ptx::wgmma_commit();
}

template <bool kWrite>
__global__ void touches_sums_in_flight(float* data, const CUtensorMap __grid_constant__) {
  zero_operands();
  Sums d;
  ptx::wgmma_fence(d);
  multiply(d);
  ptx::wgmma_commit();
  data[threadIdx.x] = d[0];
  if (kWrite) d[3] = 0.0f;
  ptx::wgmma_wait<0>(d);
}

using Kernel = void (*)(float*, const CUtensorMap&);

int launch(Kernel kernel, float* data, int threads) {
  CUtensorMap map;
  encode_tensor_map(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, data, {32, 4, 1}, {128, kBytes},
                    {32, 4, 1}, CU_TENSOR_MAP_SWIZZLE_NONE);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {kCluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kCluster);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = sizeof(Shared);
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, data, map);
}

// What a tensor map is made of, beside the address and two types.
struct Tensor {
  uint64_t size[3], strides[2];
  uint32_t box[3];
};

}  // namespace

#define KERNEL(name, threads, ...) \
  int name(float* data, int, int) { return launch(__VA_ARGS__, data, threads); }

extern "C" {

KERNEL(store_unfenced, 128, stores_what_is_not_fenced)
KERNEL(store_at_exit, 128, exits_with_a_store)
KERNEL(store_overwritten, 128, overwrites_a_store)
KERNEL(load_at_exit, 128, does_not_wait_for_a_load)
KERNEL(mbarrier_uninitialised, 128, no_init)
KERNEL(mbarrier_twice, 128, two_inits)
KERNEL(mbarrier_unfenced, 128, no_fence_of_the_init)
KERNEL(mbarrier_over_arrival, 128, arrives_too_often)
KERNEL(mbarrier_few_bytes, 128, expects_other_bytes<kBytes - 16>)
KERNEL(mbarrier_many_bytes, 128, expects_other_bytes<kBytes + 16>)
KERNEL(mbarrier_overwritten, 128, overwrites_an_mbarrier)
KERNEL(exited_block, 128, arrives_at_an_exited_block)
KERNEL(rank_outside, 128, arrives_outside)
KERNEL(multicast_outside, 128, multicasts_outside)
KERNEL(barrier_counts, 128, barrier_counts_differ)
KERNEL(register_pool, 512, too_many_registers)
KERNEL(register_direction, 512, registers_the_wrong_way)
KERNEL(wgmma_unfenced, 128, multiplies_what_is_not_fenced)
KERNEL(wgmma_no_fence, 128, no_wgmma_fence)
KERNEL(wgmma_descriptors, 128, descriptors_differ)
KERNEL(wgmma_partial, 64, no_warpgroup)
KERNEL(wgmma_range, 128, descriptor_outside)
KERNEL(wgmma_at_exit, 128, exits_with_a_wgmma)
KERNEL(wgmma_early_read, 128, touches_sums_in_flight<false>)
KERNEL(wgmma_early_write, 128, touches_sums_in_flight<true>)

int encode(void* data, int type, int swizzle, const Tensor* tensor) {
  CUtensorMap map;
  return encode_tensor_map(&map, static_cast<CUtensorMapDataType>(type), data, tensor->size,
                           tensor->strides, tensor->box, static_cast<CUtensorMapSwizzle>(swizzle));
}

}  // extern "C"
