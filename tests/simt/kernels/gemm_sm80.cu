// c = a @ b^T from sm_80 on: a is m x k, b is n x k, both FP16 or BF16, c is m x n in FP32, all
// row-major. k is a multiple of 8, m and n are any.
//
// A block of four warps computes a 128x128 tile of c, each warp a quarter of it. cp.async copies
// steps of 32 along k to a ring of three stages, two steps ahead of the tensor cores.
#include <cuda_runtime.h>

#include <ptx.cuh>

#include "amp_ext/swizzle.h"

namespace {

using namespace amp_ext;

constexpr int kThreads = 128;
constexpr int kTile = 128;     // rows of a and rows of b that a block multiplies
constexpr int kWarpTile = 64;  // the same of a warp
constexpr int kStep = 32;      // along k
constexpr int kStages = 3;
constexpr int kChunk = 8;  // elements in the 16 bytes of a cp.async or of a row of ldmatrix
constexpr int kChunks = kStep / kChunk;

// A step of 128 rows, two of them to each row of the swizzle.
template <class T>
struct alignas(kSwizzleAlignment) Tile {
  T at[kTile * kStep];

  __device__ T* chunk(int row, int i) {
    return at + swizzled(row / 2, row % 2 * kChunks + i) / sizeof(T);
  }
};

template <class T>
struct Shared {
  Tile<T> a[kStages], b[kStages];
};

// A matrix of `rows` x `columns`, of which the block needs the 128 rows from `first` on.
template <class T>
struct Operand {
  const T* data;
  int rows, columns, first;
};

// A warp's part of c, in the parts of 16x8 that one instruction adds to.
constexpr int kRowParts = kWarpTile / 16, kColumnParts = kWarpTile / 8;
using Sums = float[kRowParts][kColumnParts][4];

// Starts to copy a step of an operand. What is outside of the matrix becomes zero: it adds nothing.
template <class T>
__device__ void fetch(Tile<T>& tile, const Operand<T>& from, int step) {
  for (int i = threadIdx.x; i < kTile * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const int column = step * kStep + chunk * kChunk;
    const bool inside = from.first + row < from.rows && column < from.columns;
    const int64_t offset = static_cast<int64_t>(from.first + row) * from.columns + column;
    ptx::cp_async<16>(tile.chunk(row, chunk), from.data + (inside ? offset : 0), inside ? 16 : 0);
  }
}

// Adds the products of a step to a warp's part of c, which begins at this row and column of the
// block's tile.
template <class T>
__device__ void multiply(Sums& sums, Tile<T>& a, Tile<T>& b, int first_row, int first_column) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; chunk += 2) {
    // Four matrices of 8x8: the upper rows, the lower rows, and both again for the next 8 of k.
    uint32_t a_parts[kRowParts][4];
#pragma unroll
    for (int i = 0; i < kRowParts; ++i) {
      const int row = first_row + i * 16 + lane % 16;
      ptx::ldmatrix<false>(a_parts[i], a.chunk(row, chunk + lane / 16));
    }
    // Two parts of b at a time: of 8 columns of c both halves of k, then the next 8 columns.
    uint32_t b_parts[kColumnParts / 2][4];
#pragma unroll
    for (int j = 0; j < kColumnParts / 2; ++j) {
      const int row = first_column + j * 16 + lane / 16 * 8 + lane % 8;
      ptx::ldmatrix<false>(b_parts[j], b.chunk(row, chunk + lane / 8 % 2));
    }
#pragma unroll
    for (int i = 0; i < kRowParts; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnParts; ++j) {
        const uint32_t* both = b_parts[j / 2] + j % 2 * 2;
        const uint32_t b_part[2] = {both[0], both[1]};
        ptx::mma_m16n8k16<T>(sums[i][j], a_parts[i], b_part);
      }
    }
  }
}

// Writes a warp's part of c, which begins at this row and column, as far as it is inside.
__device__ void store(float* c, const Sums& sums, int first_row, int first_column, int m, int n) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kRowParts; ++i) {
#pragma unroll
    for (int j = 0; j < kColumnParts; ++j) {
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const int row = first_row + i * 16 + lane / 4 + d / 2 * 8;
        const int column = first_column + j * 8 + lane % 4 * 2 + d % 2;
        if (row < m && column < n) c[static_cast<int64_t>(row) * n + column] = sums[i][j][d];
      }
    }
  }
}

template <class T>
__global__ __launch_bounds__(kThreads) void gemm_sm80_kernel(const T* a, const T* b, float* c,
                                                             int m, int n, int k) {
  auto& shared = ptx::shared<Shared<T>>();
  const Operand<T> rows{a, m, k, static_cast<int>(blockIdx.x) * kTile};
  const Operand<T> columns{b, n, k, static_cast<int>(blockIdx.y) * kTile};
  const int warp = threadIdx.x / 32;
  const int warp_row = warp / 2 * kWarpTile, warp_column = warp % 2 * kWarpTile;

  const int steps = (k + kStep - 1) / kStep;
  const auto fetch_step = [&](int step) {
    if (step < steps) {
      fetch(shared.a[step % kStages], rows, step);
      fetch(shared.b[step % kStages], columns, step);
    }
    // A group for every step, an empty one behind the last, so that the count below stays right.
    ptx::cp_async_commit();
  };

  for (int step = 0; step < kStages - 1; ++step) fetch_step(step);
  Sums sums = {};
  for (int step = 0; step < steps; ++step) {
    // All of this thread's copies but those of the next step have come.
    ptx::cp_async_wait<kStages - 2>();
    // So have the other threads'. And nobody reads the step before any more: its stage is free.
    ptx::block_sync();
    fetch_step(step + kStages - 1);
    multiply(sums, shared.a[step % kStages], shared.b[step % kStages], warp_row, warp_column);
  }
  store(c, sums, rows.first + warp_row, columns.first + warp_column, m, n);
}

template <class T>
int launch(const void* a, const void* b, float* c, int m, int n, int k) {
  static_assert(sizeof(Shared<T>) <= 48 << 10, "more needs cudaFuncSetAttribute");
  cudaLaunchConfig_t config{};
  config.gridDim = dim3((m + kTile - 1) / kTile, (n + kTile - 1) / kTile);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(Shared<T>);
  return cudaLaunchKernelEx(&config, gemm_sm80_kernel<T>, static_cast<const T*>(a),
                            static_cast<const T*>(b), c, m, n, k);
}

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace

extern "C" int demo_gemm_sm80(const void* a, const void* b, float* c, int m, int n, int k,
                              int bf16) {
  if (m < 1 || n < 1 || k < 1 || k % kChunk != 0) return cudaErrorInvalidValue;
  if (!aligned(a) || !aligned(b)) return cudaErrorInvalidValue;
  return bf16 ? launch<__nv_bfloat16>(a, b, c, m, n, k) : launch<__half>(a, b, c, m, n, k);
}
