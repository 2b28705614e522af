// Wraps instructions of all architectures: memory, order between blocks, warps, barriers.
//
// sm80.cuh adds the tensor cores' instructions, sm90.cuh and wgmma.cuh Hopper's. "All lanes" and
// "all threads" are strict: each takes part, and none has exited. An instruction orders memory only
// as far as its comment says.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace amp_ext::ptx {

// Reads threadIdx.x anew, so that values derived from it hold no registers across a loop.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// Reads blockIdx.x anew, for the same reason.
__device__ __forceinline__ uint32_t block_index() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

// Reverses the bits of x.
__device__ __forceinline__ uint32_t reversed_bits(uint32_t x) { return __brev(x); }

// ---- memory ------------------------------------------------------------------------------------

// Returns the block's dynamic shared memory as a T, aligned to 1024 bytes. All threads share the
// object, which starts uninitialised.
template <class T>
__device__ __forceinline__ T& shared() {
  extern __shared__ __align__(1024) unsigned char memory[];
  return *reinterpret_cast<T*>(memory);
}

// Converts a pointer to the shared-memory address that instructions take.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Stores to shared memory. Data for TMA or wgmma is written by this function or by stmatrix.
template <class T>
__device__ __forceinline__ void store_shared(T* to, T value) {
  *to = value;
}

// Tells the compiler that `pointer`, perhaps read from a table, points to global memory.
template <class T>
__device__ __forceinline__ T* global(T* pointer) {
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

// Loads 16 bytes from global memory. `from` is 16-byte aligned.
__device__ __forceinline__ uint4 load16(const void* from) {
  return *static_cast<const uint4*>(from);
}

// Stores 16 bytes to global memory. `to` is 16-byte aligned. (The compiler would split a plain
// store of a value assembled in registers.)
__device__ __forceinline__ void store16(void* to, uint4 value) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(__cvta_generic_to_global(to)), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
               : "memory");
}

// Loads or stores 8 bytes, 8-byte aligned.
__device__ __forceinline__ uint2 load8(const void* from) {
  return *static_cast<const uint2*>(from);
}

__device__ __forceinline__ void store8(void* to, uint2 value) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};"
               :
               : "l"(__cvta_generic_to_global(to)), "r"(value.x), "r"(value.y)
               : "memory");
}

// Loads past L1, and thus sees other blocks' writes before a fence and an atomic.
template <class T>
__device__ __forceinline__ T load_l2(const T* from) {
  return __ldcg(from);
}

// ---- order between grids -----------------------------------------------------------------------
//
// A grid compiled for compute capability 9.0 or later may begin while the previous grid of the
// stream runs; see launch.cuh. On older targets these functions do nothing.

// Waits until the previous grid has ended, and sees its writes. Every thread of every kernel calls
// this before its first access to global memory. When the previous grid has ended, all earlier
// grids therefore have ended too.
__device__ __forceinline__ void wait_for_previous_grid() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}

// Lets the next grid's blocks run up to their wait, once each block has called this or ended. One
// thread per block suffices.
__device__ __forceinline__ void let_next_grid_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// ---- order between blocks ----------------------------------------------------------------------

// Orders the thread's earlier accesses before its later ones, device-wide.
__device__ __forceinline__ void device_fence() { __threadfence(); }

// Adds one and returns the previous value; wraps to 0 after `last`. Orders no memory.
__device__ __forceinline__ uint32_t ticket(uint32_t* counter, uint32_t last) {
  return atomicInc(counter, last);
}

// Stores a value to an address that several threads may write; one value stays. Orders no memory.
__device__ __forceinline__ void store_any(int64_t* to, int64_t value) {
  atomicExch(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(value));
}

__device__ __forceinline__ void store_any(float* to, float value) { atomicExch(to, value); }

// ---- warps: all lanes take part ----------------------------------------------------------------

constexpr uint32_t kAllLanes = 0xffffffffu;

// Returns the value of the lane whose index differs in the bits of `mask`.
template <class T>
__device__ __forceinline__ T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(kAllLanes, value, mask);
}

// Returns lane 0's value, which the compiler then treats as uniform across lanes.
__device__ __forceinline__ int warp_uniform(int value) { return __shfl_sync(kAllLanes, value, 0); }

// Returns whether `predicate` is true in any lane.
__device__ __forceinline__ bool warp_any(bool predicate) {
  return __any_sync(kAllLanes, predicate);
}

// Orders memory accesses within the warp.
__device__ __forceinline__ void warp_sync() { __syncwarp(); }

// ---- blocks ------------------------------------------------------------------------------------

// Waits for all threads of the block and orders their memory accesses.
__device__ __forceinline__ void block_sync() { __syncthreads(); }

// Returns whether `predicate` is true in any thread. All threads take part; orders memory as
// block_sync.
__device__ __forceinline__ bool block_any(bool predicate) { return __syncthreads_or(predicate); }

// Waits at named barrier kId (1 to 15) for kThreads threads in whole warps. Orders their memory
// accesses within the block.
template <int kId, int kThreads>
__device__ __forceinline__ void barrier_sync() {
  static_assert(kId >= 1 && kId <= 15 && kThreads % 32 == 0);
  asm volatile("bar.sync %0, %1;" : : "n"(kId), "n"(kThreads) : "memory");
}

}  // namespace amp_ext::ptx
