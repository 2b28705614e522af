// Kernels with a deliberate fault each, and one without: test_simt_faults.py looks at the reports.
#include <cuda_runtime.h>

#include <ptx/sm80.cuh>

namespace {

using namespace amp_ext;

struct Shared {
  float at[64];
};

// Each block turns its 64 numbers round.
template <bool kWait>
__global__ void reverse(float* data) {
  auto& shared = ptx::shared<Shared>();
  data += 64 * blockIdx.x;
  shared.at[threadIdx.x] = data[threadIdx.x];
  if constexpr (kWait) ptx::block_sync();
  data[threadIdx.x] = shared.at[63 - threadIdx.x];
}

__global__ void half_of_the_block_waits(float*) {
  if (threadIdx.x < 32) ptx::block_sync();
}

__global__ void one_lane_does_not_shuffle(float* data) {
  if (threadIdx.x != 5) data[threadIdx.x] = static_cast<float>(ptx::shuffle_xor(1.0, 1));
}

__global__ void lanes_part(float* data) {
  if (threadIdx.x % 2)
    ptx::warp_any(true);
  else
    data[threadIdx.x] = static_cast<float>(ptx::shuffle_xor(1.0, 1));
}

__global__ void warps_part(float*) {
  if (threadIdx.x < 32)
    ptx::block_sync();
  else
    ptx::block_any(false);
}

__global__ void writes_behind_shared(float*) {
  if (threadIdx.x == 7) ptx::shared<Shared>().at[64 + blockIdx.x] = 1.0f;
}

__global__ void asks_for_too_little_shared(float* data) {
  data[threadIdx.x] = ptx::shared<Shared[2]>()[1].at[threadIdx.x];
}

__global__ void reads_shared_before_it_writes(float* data) {
  data[threadIdx.x] = ptx::shared<Shared>().at[threadIdx.x];
}

// A quarter of the threads fetch four numbers each, and all read what another thread fetched.
template <bool kWait, bool kSync>
__global__ void fetch(float* data) {
  auto& shared = ptx::shared<Shared>();
  data += 64 * blockIdx.x;
  if (threadIdx.x < 16) ptx::cp_async16(&shared.at[4 * threadIdx.x], data + 4 * threadIdx.x);
  ptx::cp_async_commit();
  if constexpr (kWait) ptx::cp_async_wait<0>();
  if constexpr (kSync) ptx::block_sync();
  const float neighbour = shared.at[threadIdx.x ^ 4];
  ptx::cp_async_wait<0>();
  ptx::block_sync();
  data[threadIdx.x] = neighbour;
}

__global__ void exits_with_a_copy(float* data) { ptx::cp_async16(ptx::shared<Shared>().at, data); }

__global__ void copies_behind_shared(float* data) {
  ptx::cp_async16(&ptx::shared<Shared>().at[64], data);
}

__global__ void fetches_from_behind_global(float* data) {
  ptx::cp_async16(ptx::shared<Shared>().at, data + 128);
  ptx::cp_async_wait<0>();
}

__global__ void misaligned_row(float*) {
  uint32_t registers[2];
  ptx::ldmatrix<false>(registers, &ptx::shared<Shared>().at[4 * (threadIdx.x % 8) + 1]);
}

__global__ void writes_behind_global(float* data) {
  if (threadIdx.x == 9) data[128 + blockIdx.x] = 1.0f;
}

__global__ void misaligned_vector(float* data) {
  if (threadIdx.x == 3) ptx::store16(data + 1, ptx::load16(data));
}

__global__ void misaligned_scalar(float* data) {
  if (threadIdx.x == 3) *reinterpret_cast<float*>(reinterpret_cast<char*>(data) + 2) = 1.0f;
}

__global__ void all_blocks_write(float* data) {
  if (threadIdx.x == 0) *data = 1.0f;
}

// Block 0 hands data[0] to block 1 through a counter in data[2].
template <bool kFence>
__global__ void hand_over(float* data) {
  if (threadIdx.x != 0) return;
  auto* counter = reinterpret_cast<uint32_t*>(data + 2);
  if (blockIdx.x == 0) data[0] = 5.0f;
  if constexpr (kFence) ptx::device_fence();
  const bool second = ptx::ticket(counter, 1) == 1;
  ptx::device_fence();
  if (second && blockIdx.x == 1) data[1] = data[0];
}

// What the two below do wrong is seen where they may begin early.
__global__ void waits_for_no_grid(float*) {}

__global__ void waits_for_a_grid_too_late(float* data) {
  const uint4 bits = ptx::load16(data);
  ptx::wait_for_previous_grid();
  ptx::store16(data, bits);
}

int launch(void (*kernel)(float*), float* data, int blocks, int threads, bool early = false) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = sizeof(Shared);
  config.attrs = &attribute;
  config.numAttrs = early;
  return cudaLaunchKernelEx(&config, kernel, data);
}

}  // namespace

#define KERNEL(name, ...)                              \
  int name(float* data, int blocks, int threads) {     \
    return launch(__VA_ARGS__, data, blocks, threads); \
  }
#define EARLY(name, kernel)                             \
  int name(float* data, int blocks, int threads) {      \
    return launch(kernel, data, blocks, threads, true); \
  }

extern "C" {

KERNEL(good, reverse<true>)
KERNEL(no_barrier, reverse<false>)
KERNEL(half_waits, half_of_the_block_waits)
KERNEL(no_shuffle, one_lane_does_not_shuffle)
KERNEL(lanes_differ, lanes_part)
KERNEL(warps_differ, warps_part)
KERNEL(shared_write, writes_behind_shared)
KERNEL(shared_size, asks_for_too_little_shared)
KERNEL(shared_poison, reads_shared_before_it_writes)
KERNEL(copied, fetch<true, true>)
KERNEL(copy_unwaited, fetch<false, true>)
KERNEL(copy_unsynchronised, fetch<true, false>)
KERNEL(copy_at_exit, exits_with_a_copy)
KERNEL(copy_range, copies_behind_shared)
KERNEL(copy_global, fetches_from_behind_global)
KERNEL(row_alignment, misaligned_row)
KERNEL(global_write, writes_behind_global)
KERNEL(vector_alignment, misaligned_vector)
KERNEL(scalar_alignment, misaligned_scalar)
KERNEL(blocks_race, all_blocks_write)
KERNEL(fenced, hand_over<true>)
KERNEL(unfenced, hand_over<false>)
EARLY(early_exit, waits_for_no_grid)
EARLY(early_load, waits_for_a_grid_too_late)

}  // extern "C"
