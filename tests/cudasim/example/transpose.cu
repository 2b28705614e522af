// A small library of CUDA in the ordinary style: two transposes, one with a race, and a sum.
#include <cuda_runtime.h>

namespace {

constexpr int kTile = 32, kRows = 8;

// A column of padding keeps the threads that read a column in different banks.
__global__ void transpose(const float* in, float* out, int n) {
  __shared__ float tile[kTile][kTile + 1];
  int x = blockIdx.x * kTile + threadIdx.x, y = blockIdx.y * kTile + threadIdx.y;
  for (int j = 0; j < kTile; j += kRows)
    if (x < n && y + j < n) tile[threadIdx.y + j][threadIdx.x] = in[(y + j) * n + x];
  __syncthreads();
  x = blockIdx.y * kTile + threadIdx.x, y = blockIdx.x * kTile + threadIdx.y;
  for (int j = 0; j < kTile; j += kRows)
    if (x < n && y + j < n) out[(y + j) * n + x] = tile[threadIdx.x][threadIdx.y + j];
}

// The same by a block for each row of tiles. A barrier is missing behind the last reads of a tile:
// the next tile overwrites it. Most often the result is right.
__global__ void transpose_in_haste(const float* in, float* out, int n) {
  __shared__ float tile[kTile][kTile + 1];
  const int y = blockIdx.x * kTile + threadIdx.y;
  for (int left = 0; left < n; left += kTile) {
    for (int j = 0; j < kTile; j += kRows)
      if (left + threadIdx.x < n && y + j < n)
        tile[threadIdx.y + j][threadIdx.x] = in[(y + j) * n + left + threadIdx.x];
    __syncthreads();
    for (int j = 0; j < kTile; j += kRows)
      if (blockIdx.x * kTile + threadIdx.x < n && left + threadIdx.y + j < n)
        out[(left + threadIdx.y + j) * n + blockIdx.x * kTile + threadIdx.x] =
            tile[threadIdx.x][threadIdx.y + j];
  }
}

__global__ void sum(const float* in, float* out, int count) {
  float mine = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    mine += in[i];
  for (int step = 16; step > 0; step /= 2) mine += __shfl_down_sync(0xffffffff, mine, step);
  if (threadIdx.x % 32 == 0) atomicAdd(out, mine);
}

int tiles(int n) { return (n + kTile - 1) / kTile; }

}  // namespace

extern "C" int example_transpose(const float* in, float* out, int n, bool in_haste) {
  const dim3 threads(kTile, kRows);
  if (in_haste)
    transpose_in_haste<<<tiles(n), threads>>>(in, out, n);
  else
    transpose<<<dim3(tiles(n), tiles(n)), threads>>>(in, out, n);
  return cudaGetLastError();
}

extern "C" int example_sum(const float* in, float* out, int count) {
  sum<<<4, 128>>>(in, out, count);
  return cudaGetLastError();
}
