// sums[i] = the sum of row i of a matrix, by one block a row. Each thread adds its elements in
// order, then the lanes of a warp are added, then the warps: the result is bitwise the same in
// every run, but depends on how the row is aligned.
#include <cuda_runtime.h>

#include <ptx.cuh>

#include "pack.cuh"

namespace {

using namespace amp_ext;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

struct Shared {
  float warp[kWarps];
};

// This thread's share of a row, by 16-byte loads. The elements before the first multiple of 16
// bytes and those behind the last one, at most three of each, are loaded one by one.
__device__ float thread_sum(const float* row, int columns) {
  using Floats = Pack<float>;
  const int thread = threadIdx.x;
  const int misaligned = reinterpret_cast<uintptr_t>(row) % 16 / sizeof(float);
  const int to_boundary = (Floats::kSize - misaligned) % Floats::kSize;
  const int head = columns < to_boundary ? columns : to_boundary;
  const int packs = (columns - head) / Floats::kSize;
  const int tail = head + packs * Floats::kSize;

  float sum = thread < head ? row[thread] : 0.0f;
  for (int i = thread; i < packs; i += kThreads) {
    const auto pack = Floats::from(ptx::load16(row + head + i * Floats::kSize));
    for (const float x : pack.at) sum += x;
  }
  if (tail + thread < columns) sum += row[tail + thread];
  return sum;
}

// The sum over a warp, in all of its lanes: each step adds the lanes that differ in one bit.
__device__ float warp_sum(float value) {
  for (int mask = 16; mask > 0; mask /= 2) value += ptx::shuffle_xor(value, mask);
  return value;
}

__global__ __launch_bounds__(kThreads) void block_sum_kernel(const float* x, float* sums,
                                                             int columns) {
  auto& shared = ptx::shared<Shared>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  const float of_warp =
      warp_sum(thread_sum(x + static_cast<int64_t>(blockIdx.x) * columns, columns));
  if (lane == 0) shared.warp[warp] = of_warp;
  // The first warp reads what every warp wrote.
  ptx::block_sync();
  if (warp > 0) return;

  const float of_block = warp_sum(lane < kWarps ? shared.warp[lane] : 0.0f);
  if (lane == 0) sums[blockIdx.x] = of_block;
}

}  // namespace

// x is rows x columns, row-major and aligned to its elements.
extern "C" int demo_block_sum(const float* x, float* sums, int rows, int columns) {
  if (rows < 1 || columns < 0) return cudaErrorInvalidValue;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(rows);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(Shared);
  return cudaLaunchKernelEx(&config, block_sum_kernel, x, sums, columns);
}
