// Kernels with one race each. Comments name both lines that the report has to name.
#include <cuda_pipeline.h>

extern "C" __global__ void no_barrier(const float* in, float* out) {
  __shared__ float numbers[64];
  numbers[threadIdx.x] = 0;
  __syncthreads();
  numbers[threadIdx.x] = in[threadIdx.x];        // no_barrier
  out[threadIdx.x] = numbers[63 - threadIdx.x];  // no_barrier
}

// The barrier behind the last reads of a round is missing.
extern "C" __global__ void overwritten(const float* in, float* out) {
  __shared__ float numbers[64];
  for (int i = 0; i < 4; ++i) {
    numbers[threadIdx.x] = in[i * 64 + threadIdx.x];  // overwritten
    __syncthreads();
    out[i * 64 + threadIdx.x] = numbers[63 - threadIdx.x];  // overwritten
  }
}

// Thread 0 draws the ticket while other warps of its block still read what the last block writes.
extern "C" __global__ void early_ticket(float* step, float* out, unsigned* ticket) {
  __shared__ bool is_last;
  out[blockIdx.x * blockDim.x + threadIdx.x] = *step;  // early_ticket
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(ticket, 1) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (is_last && threadIdx.x == 0) *step += 1;  // early_ticket
}

extern "C" __global__ void no_fence(float* sums, unsigned* ticket) {
  __shared__ bool is_last;
  if (threadIdx.x == 0) {
    sums[blockIdx.x] = 1;  // no_fence
    is_last = atomicAdd(ticket, 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (!is_last || threadIdx.x) return;
  for (int i = 1; i < gridDim.x; ++i) sums[0] += sums[i];  // no_fence
}

extern "C" __global__ void block_scope(unsigned* count) {
  if (threadIdx.x == 0) atomicAdd_block(count, 1);  // block_scope
}

// Lanes store different values to one address.
extern "C" __global__ void lanes_store(float* out) {
  if (threadIdx.x < 32) *out = threadIdx.x;  // lanes_store
}

extern "C" __global__ void plain_store(float* out) {
  if (threadIdx.x % 32 == 0) *out = threadIdx.x;  // plain_store
}

extern "C" __global__ void unwaited_copy(const float* in, float* out) {
  __shared__ float numbers[64];
  __pipeline_memcpy_async(&numbers[threadIdx.x], &in[threadIdx.x], sizeof(float));  // unwaited_copy
  __pipeline_commit();
  __syncthreads();
  out[threadIdx.x] = numbers[63 - threadIdx.x];  // unwaited_copy
  __pipeline_wait_prior(0);
}

extern "C" __global__ void copy_without_barrier(const float* in, float* out) {
  __shared__ float numbers[64];
  const int i = threadIdx.x;
  numbers[i] = 0;
  __syncthreads();
  __pipeline_memcpy_async(&numbers[i], &in[i], sizeof(float));  // copy_without_barrier
  __pipeline_commit();
  __pipeline_wait_prior(0);
  out[i] = numbers[63 - i];  // copy_without_barrier
}

extern "C" __global__ void narrow_fence(float* sums, unsigned* ticket) {
  __shared__ bool is_last;
  if (threadIdx.x == 0) {
    sums[blockIdx.x] = 1;  // narrow_fence
    __threadfence_block();
    is_last = atomicAdd(ticket, 1) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (!is_last || threadIdx.x) return;
  for (int i = 1; i < gridDim.x; ++i) sums[0] += sums[i];  // narrow_fence
}

extern "C" __global__ void narrow_fence_after_look(float* sums, unsigned* ticket) {
  if (threadIdx.x > 0) return;
  sums[blockIdx.x] = 1;  // narrow_fence_after_look
  __threadfence();
  atomicAdd(ticket, 1);
  while (*static_cast<volatile unsigned*>(ticket) < gridDim.x) continue;
  __threadfence_block();
  sums[gridDim.x + blockIdx.x] = sums[(blockIdx.x + 1) % gridDim.x];  // narrow_fence_after_look
}

// A thread that has seen all tickets reads what their blocks have stored.
extern "C" __global__ void no_fence_after_look(float* sums, unsigned* ticket) {
  if (threadIdx.x > 0) return;
  sums[blockIdx.x] = 1;  // no_fence_after_look
  __threadfence();
  atomicAdd(ticket, 1);
  while (*static_cast<volatile unsigned*>(ticket) < gridDim.x) continue;
  sums[gridDim.x + blockIdx.x] = sums[(blockIdx.x + 1) % gridDim.x];  // no_fence_after_look
}

// A lane reads what its neighbour has stored.
extern "C" __global__ void lanes_read(const float* in, float* out) {
  __shared__ float numbers[64];
  const int i = threadIdx.x;
  numbers[i] = in[i];       // lanes_read
  out[i] = numbers[i ^ 1];  // lanes_read
}

// Lanes have read, and a shuffle has met them, which orders no memory.
extern "C" __global__ void lanes_write(const float* in, float* out) {
  __shared__ float numbers[64];
  const int i = threadIdx.x;
  numbers[i] = in[i];
  __syncwarp();
  const float x = numbers[i ^ 1];                  // lanes_write
  numbers[i] = __shfl_xor_sync(0xffffffff, x, 2);  // lanes_write
  out[i] = numbers[i];
}

// Lane 0 releases what all lanes of its warp have read; the other warp writes.
extern "C" __global__ void lanes_release(const float* in, float* out) {
  __shared__ float number;
  __shared__ alignas(8) unsigned long long read;
  const unsigned barrier = static_cast<unsigned>(__cvta_generic_to_shared(&read));
  if (threadIdx.x == 0) {
    number = in[0];
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    out[threadIdx.x] = number;  // lanes_release
    if (threadIdx.x == 0)
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
  } else if (threadIdx.x == 32) {
    for (unsigned done = 0; !done;)
      asm volatile(
          "{ .reg .pred p;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\n"
          "selp.u32 %0, 1, 0, p; }"
          : "=r"(done)
          : "r"(barrier)
          : "memory");
    number = 1;  // lanes_release
  }
}
