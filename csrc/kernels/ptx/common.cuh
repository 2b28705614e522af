// Special instructions that every architecture has, one small function each: memory, order between
// blocks, warps, barriers. sm80.cuh adds those of tensor cores, sm90.cuh and wgmma.cuh Hopper's.
//
// "All lanes" and "all threads" are strict: none may be elsewhere or have exited. Nothing is
// ordered but by what a comment says.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace amp_ext::ptx {

// threadIdx.x, read anew at each use: nothing that is computed from it outlives a loop in
// registers.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// blockIdx.x, likewise.
__device__ __forceinline__ uint32_t block_index() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

// Bit 31 - i is bit i of x.
__device__ __forceinline__ uint32_t reversed_bits(uint32_t x) { return __brev(x); }

// 1 / x, off by one unit in the last place at most; 0 where that is subnormal.
__device__ __forceinline__ float reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// ---- memory ------------------------------------------------------------------------------------

// The block's dynamic shared memory as a T, aligned to 1024 bytes. All threads see the same object;
// it starts uninitialised.
template <class T>
__device__ __forceinline__ T& shared() {
  extern __shared__ __align__(1024) unsigned char memory[];
  return *reinterpret_cast<T*>(memory);
}

// The address of an object in shared memory as instructions take it.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Stores to shared memory. Whatever TMA or wgmma is to read is written by this or by stmatrix.
template <class T>
__device__ __forceinline__ void store_shared(T* to, T value) {
  *to = value;
}

// Tells the compiler that `pointer`, which it may have read from a table, points to global memory.
template <class T>
__device__ __forceinline__ T* global(T* pointer) {
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

// A 16-byte load from global memory. `from` is 16-byte aligned.
__device__ __forceinline__ uint4 load16(const void* from) {
  return *static_cast<const uint4*>(from);
}

// A 16-byte store to global memory. `to` is 16-byte aligned. (The compiler splits a plain store of
// a value that it has put together itself.)
__device__ __forceinline__ void store16(void* to, uint4 value) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(__cvta_generic_to_global(to)), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
               : "memory");
}

// The same of 8 bytes, with that alignment.
__device__ __forceinline__ uint2 load8(const void* from) {
  return *static_cast<const uint2*>(from);
}

__device__ __forceinline__ void store8(void* to, uint2 value) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};"
               :
               : "l"(__cvta_generic_to_global(to)), "r"(value.x), "r"(value.y)
               : "memory");
}

// A load that does not come from L1: what other blocks wrote before a fence and an atomic is seen.
template <class T>
__device__ __forceinline__ T load_l2(const T* from) {
  return __ldcg(from);
}

// ---- order between grids -----------------------------------------------------------------------
//
// A grid of code for compute capability 9.0 or more may begin while the one before it in the stream
// still runs: see launch.cuh. On others these do nothing.

// Waits until the grid before has ended, and sees what it wrote. Every thread of every kernel comes
// here before it accesses global memory: that the grid before has ended then implies that all
// before that one have.
__device__ __forceinline__ void wait_for_previous_grid() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}

// Lets blocks of the next grid begin, up to that wait, once each block of this one has come here or
// ended. One thread suffices.
__device__ __forceinline__ void let_next_grid_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// ---- order between blocks ----------------------------------------------------------------------

// Orders this thread's earlier accesses before its later ones, for every thread of the device.
__device__ __forceinline__ void device_fence() { __threadfence(); }

// Adds one and returns the value before; wraps to 0 after `last`. Orders nothing by itself.
__device__ __forceinline__ uint32_t ticket(uint32_t* counter, uint32_t last) {
  return atomicInc(counter, last);
}

// What a counter of tickets says. Orders nothing.
__device__ __forceinline__ uint32_t look(const uint32_t* counter) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];"
               : "=r"(value)
               : "l"(__cvta_generic_to_global(counter))
               : "memory");
  return value;
}

// Stores a value that several threads may store at once; one of them stays. Orders nothing.
__device__ __forceinline__ void store_any(int64_t* to, int64_t value) {
  atomicExch(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(value));
}

__device__ __forceinline__ void store_any(float* to, float value) { atomicExch(to, value); }

// ---- warps: all lanes take part ----------------------------------------------------------------

constexpr uint32_t kAllLanes = 0xffffffffu;

// The value of the lane whose index differs in the bits of `mask`.
template <class T>
__device__ __forceinline__ T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(kAllLanes, value, mask);
}

// The value of lane 0. The compiler knows that it is the same in all lanes.
__device__ __forceinline__ int warp_uniform(int value) { return __shfl_sync(kAllLanes, value, 0); }

// True in every lane if `predicate` is true in one.
__device__ __forceinline__ bool warp_any(bool predicate) {
  return __any_sync(kAllLanes, predicate);
}

// In how many lanes `predicate` is true, in every lane.
__device__ __forceinline__ int warp_count(bool predicate) {
  return __popc(__ballot_sync(kAllLanes, predicate));
}

// Orders the lanes' memory accesses within the warp.
__device__ __forceinline__ void warp_sync() { __syncwarp(); }

// ---- blocks ------------------------------------------------------------------------------------

// Waits for all threads of the block; orders their memory accesses within the block.
__device__ __forceinline__ void block_sync() { __syncthreads(); }

// True in every thread if `predicate` is true in one. All threads of the block take part; orders as
// block_sync.
__device__ __forceinline__ bool block_any(bool predicate) { return __syncthreads_or(predicate); }

// Waits at one of the named barriers 1 to 15 until kThreads threads, whole warps, have come to it;
// orders their memory accesses within the block.
template <int kId, int kThreads>
__device__ __forceinline__ void barrier_sync() {
  static_assert(kId >= 1 && kId <= 15 && kThreads % 32 == 0);
  asm volatile("bar.sync %0, %1;" : : "n"(kId), "n"(kThreads) : "memory");
}

}  // namespace amp_ext::ptx
