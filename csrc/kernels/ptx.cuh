// Every special instruction that kernels use, one small function each.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace amp_ext::ptx {

// The block's dynamic shared memory as a T. All threads see the same object; it starts
// uninitialised.
template <class T>
__device__ __forceinline__ T& shared() {
  extern __shared__ __align__(1024) unsigned char memory[];
  return *reinterpret_cast<T*>(memory);
}

// Tells the compiler that `pointer`, which it may have read from a table, points to global memory.
template <class T>
__device__ __forceinline__ T* global(T* pointer) {
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

// A 16-byte load. `from` is 16-byte aligned.
__device__ __forceinline__ uint4 load16(const void* from) {
  return *static_cast<const uint4*>(from);
}

// A 16-byte store. `to` is 16-byte aligned.
__device__ __forceinline__ void store16(void* to, uint4 value) { *static_cast<uint4*>(to) = value; }

// A load that does not come from L1: what other blocks wrote before a fence and an atomic is seen.
__device__ __forceinline__ double load_l2(const double* from) { return __ldcg(from); }

// The value of the lane whose index differs in the bits of `mask`. All 32 lanes take part.
__device__ __forceinline__ double shuffle_xor(double value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}

// True in every lane if `predicate` is true in one. All 32 lanes take part.
__device__ __forceinline__ bool warp_any(bool predicate) {
  return __any_sync(0xffffffffu, predicate);
}

// Waits for all threads of the block; orders their shared and global memory accesses within the
// block.
__device__ __forceinline__ void block_sync() { __syncthreads(); }

// True in every thread if `predicate` is true in one. All threads of the block take part; orders as
// block_sync.
__device__ __forceinline__ bool block_any(bool predicate) { return __syncthreads_or(predicate); }

// Orders this thread's earlier writes before its later ones, for every thread of the device.
__device__ __forceinline__ void device_fence() { __threadfence(); }

// Adds one and returns the value before; wraps to 0 after `last`.
__device__ __forceinline__ uint32_t ticket(uint32_t* counter, uint32_t last) {
  return atomicInc(counter, last);
}

// Stores a value that several threads may store at once; one of them stays.
__device__ __forceinline__ void store_any(int64_t* to, int64_t value) {
  atomicExch(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(value));
}

__device__ __forceinline__ void store_any(float* to, float value) { atomicExch(to, value); }

}  // namespace amp_ext::ptx
