// Kernels in the ordinary style: __shared__, __syncthreads, shuffles, atomics.
#include <cuda_fp16.h>
#include <cuda_pipeline.h>

__device__ float warp_sum(float x) {
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(0xffffffff, x, i);
  return x;
}

// The last block to finish adds the sums of the blocks.
extern "C" __global__ void sum_by_ticket(const float* x, float* sums, unsigned* ticket, int n) {
  __shared__ float of_warps[8];
  __shared__ bool is_last;
  float sum = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    sum += x[i];
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    float total = 0;
    for (int i = 0; i < blockDim.x / 32; ++i) total += of_warps[i];
    sums[blockIdx.x] = total;
    __threadfence();
    is_last = atomicAdd(ticket, 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (!is_last || threadIdx.x > 0) return;
  __threadfence();
  float total = 0;
  for (int i = 0; i < gridDim.x; ++i) total += sums[i];
  sums[0] = total;
}

// Blocks that have seen all tickets read what their neighbours have stored.
extern "C" __global__ void neighbours(float* numbers, unsigned* ticket) {
  if (threadIdx.x > 0) return;
  numbers[blockIdx.x] = blockIdx.x;
  __threadfence();
  atomicAdd(ticket, 1);
  while (*static_cast<volatile unsigned*>(ticket) < gridDim.x) continue;
  __threadfence();
  numbers[gridDim.x + blockIdx.x] = numbers[(blockIdx.x + 1) % gridDim.x];
}

extern "C" __global__ void histogram(const unsigned char* x, unsigned* bins, int n) {
  extern __shared__ unsigned own[];
  for (int i = threadIdx.x; i < 256; i += blockDim.x) own[i] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    atomicAdd(&own[x[i]], 1);
  __syncthreads();
  for (int i = threadIdx.x; i < 256; i += blockDim.x) atomicAdd(&bins[i], own[i]);
}

// Loops of different lengths, a local array and integer division.
extern "C" __global__ void collatz(const unsigned* x, unsigned* steps) {
  unsigned n = x[threadIdx.x], count = 0, seen[4] = {};
  while (n != 1) {
    ++seen[n % 4];
    n = n % 2 ? 3 * n + 1 : n / 2;
    ++count;
  }
  steps[threadIdx.x] = count == seen[0] + seen[1] + seen[2] + seen[3] ? count : 0;
}

extern "C" __global__ void bits(const unsigned* x, unsigned* out) {
  const unsigned a = x[threadIdx.x], b = a * 2654435761u;
  unsigned* const to = out + 6 * threadIdx.x;
  to[0] = __popc(a);
  to[1] = __clz(a);
  to[2] = __brev(a);
  to[3] = __ffs(a);
  to[4] = __funnelshift_l(a, b, a & 31);
  to[5] = __byte_perm(a, b, 0x7610);
}

extern "C" __global__ void scale_halves(__half2* x, float factor) {
  x[threadIdx.x] = __hfma2(x[threadIdx.x], __float2half2_rn(factor), __float2half2_rn(1.0f));
}

// Two stages of copies, one in flight while the other is read.
extern "C" __global__ void copy_in_stages(const float* in, float* out, int stages) {
#if __CUDA_ARCH__ >= 800
  __shared__ float staged[2][64];
  const int i = threadIdx.x;
  __pipeline_memcpy_async(&staged[0][i], &in[i], sizeof(float));
  __pipeline_commit();
  for (int s = 0; s < stages; ++s) {
    if (s + 1 < stages)
      __pipeline_memcpy_async(&staged[(s + 1) % 2][i], &in[(s + 1) * 64 + i], sizeof(float));
    __pipeline_commit();
    __pipeline_wait_prior(1);
    __syncthreads();
    out[s * 64 + i] = staged[s % 2][63 - i];
    __syncthreads();
  }
#endif
}

// Lanes reverse numbers of their warp, then of each half of it.
extern "C" __global__ void reverse_in_warp(const float* in, float* out) {
  __shared__ float numbers[64];
  const int i = threadIdx.x;
  numbers[i] = in[i];
  __syncwarp();
  const float x = numbers[i ^ 31];
  __syncwarp();
  numbers[i] = x;
  const unsigned half = i & 16 ? 0xffff0000 : 0xffff;
  if (i & 16)
    __syncwarp(half);
  else
    __syncwarp(half);
  out[i] = numbers[i ^ 15];
}
