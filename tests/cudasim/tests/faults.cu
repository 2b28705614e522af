// Kernels with one fault each. A comment names the kernel in the line that the report has to name.
#include <cuda_pipeline.h>

extern "C" __global__ void shared_bounds(int* out) {
  __shared__ int numbers[64];
  numbers[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = numbers[threadIdx.x + 1];  // shared_bounds
}

extern "C" __global__ void global_bounds(int* out) {
  out[threadIdx.x + 1] = 1;  // global_bounds
}

extern "C" __global__ void misaligned(float* out) {
  *reinterpret_cast<float2*>(out + 1) = make_float2(1, 2);  // misaligned
}

extern "C" __global__ void shared_fresh(int* out) {
  __shared__ int numbers[64];
  if (threadIdx.x < 32) numbers[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = numbers[threadIdx.x];  // shared_fresh
}

extern "C" __global__ void global_fresh(int* out, const int* in) {
  out[threadIdx.x] = in[threadIdx.x];  // global_fresh
}

extern "C" __global__ void exited(int* out) {
  if (threadIdx.x >= 32) return;
  __syncthreads();  // exited
  out[threadIdx.x] = 1;
}

extern "C" __global__ void divergent_shuffle(int* out) {
  if (threadIdx.x < 16)
    out[threadIdx.x] = __shfl_sync(0xffffffff, threadIdx.x, 1);  // divergent_shuffle
}

extern "C" __global__ void foreign_lane(int* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xffff, threadIdx.x, 20);  // foreign_lane
}

extern "C" __global__ void trap() {
  if (threadIdx.x == 40) __trap();  // trap
}

extern "C" __global__ void wrong_count(int* out) {
  if (threadIdx.x < 32)
    asm volatile("bar.sync 1, 64;" ::: "memory");
  else
    asm volatile("bar.sync 1, 32;" ::: "memory");
  out[threadIdx.x] = 1;
}

extern "C" __global__ void deadlock(int* out) {
  if (threadIdx.x < 32) asm volatile("bar.sync 1, 64;" ::: "memory");  // deadlock
  out[threadIdx.x] = 1;
}

extern "C" __global__ void copy_in_flight(const int* in) {
  __shared__ int numbers[64];
  __pipeline_memcpy_async(&numbers[threadIdx.x], &in[threadIdx.x], sizeof(int));
}
