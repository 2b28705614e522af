// Every special instruction that kernels use from sm_80 on, one small function each; ptx_sm90.cuh
// adds Hopper's.
//
// "All lanes" and "all threads" are strict: none may be elsewhere or have exited. Nothing is
// ordered but by what a comment says.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

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

// What the caches are told of an access to global memory.
enum class Cache {
  normal,
  streaming,  // touched once: the first to be evicted
  read_only,  // loads only: nobody writes it during the kernel, and L1 does not keep it
};

// A 16-byte load from global memory. `from` is 16-byte aligned.
template <Cache kCache = Cache::normal>
__device__ __forceinline__ uint4 load16(const void* from) {
  const auto* vector = static_cast<const uint4*>(from);
  if constexpr (kCache == Cache::normal) return *vector;
  if constexpr (kCache == Cache::streaming) return __ldcs(vector);
  uint4 to;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
               : "l"(__cvta_generic_to_global(from)));
  return to;
}

// A 16-byte store to global memory. `to` is 16-byte aligned. (The compiler splits a plain store of
// a value that it has put together itself.)
template <Cache kCache = Cache::normal>
__device__ __forceinline__ void store16(void* to, uint4 value) {
  static_assert(kCache != Cache::read_only);
  if constexpr (kCache == Cache::streaming) __stcs(static_cast<uint4*>(to), value);
  if constexpr (kCache == Cache::normal)
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(__cvta_generic_to_global(to)), "r"(value.x), "r"(value.y), "r"(value.z),
                   "r"(value.w)
                 : "memory");
}

// A load that does not come from L1: what other blocks wrote before a fence and an atomic is seen.
template <class T>
__device__ __forceinline__ T load_l2(const T* from) {
  return __ldcg(from);
}

// ---- order between blocks ----------------------------------------------------------------------

// Orders this thread's earlier accesses before its later ones, for every thread of the device.
__device__ __forceinline__ void device_fence() { __threadfence(); }

// Adds one and returns the value before; wraps to 0 after `last`. Orders nothing by itself.
__device__ __forceinline__ uint32_t ticket(uint32_t* counter, uint32_t last) {
  return atomicInc(counter, last);
}

// Stores a value that several threads may store at once; one of them stays. Orders nothing.
__device__ __forceinline__ void store_any(int64_t* to, int64_t value) {
  atomicExch(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(value));
}

__device__ __forceinline__ void store_any(float* to, float value) { atomicExch(to, value); }

// Adds to a counter after all that this thread did before, and what it knows to be done.
__device__ __forceinline__ void add_release(uint32_t* counter, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;"
               :
               : "l"(__cvta_generic_to_global(counter)), "r"(value)
               : "memory");
}

// Waits until a counter has a value, before all that this thread does afterwards. Whoever adds to
// it must run at the same time or have run before: say at each use why that is so.
__device__ __forceinline__ void wait_acquire(const uint32_t* counter, uint32_t value) {
  uint32_t seen;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                 : "=r"(seen)
                 : "l"(__cvta_generic_to_global(counter))
                 : "memory");
  } while (seen != value);
}

// ---- warps: all lanes take part ----------------------------------------------------------------

constexpr uint32_t kAllLanes = 0xffffffffu;

// The value of the lane whose index differs in the bits of `mask`.
template <class T>
__device__ __forceinline__ T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(kAllLanes, value, mask);
}

// The value of one lane.
template <class T>
__device__ __forceinline__ T shuffle(T value, int lane) {
  return __shfl_sync(kAllLanes, value, lane);
}

// True in every lane if `predicate` is true in one.
__device__ __forceinline__ bool warp_any(bool predicate) {
  return __any_sync(kAllLanes, predicate);
}

// A bit for each lane in which `predicate` is true.
__device__ __forceinline__ uint32_t warp_ballot(bool predicate) {
  return __ballot_sync(kAllLanes, predicate);
}

// The largest value of the lanes.
__device__ __forceinline__ uint32_t warp_max(uint32_t value) {
  return __reduce_max_sync(kAllLanes, value);
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

// Comes to a named barrier without waiting; what was done before is ordered before whoever waits.
template <int kId, int kThreads>
__device__ __forceinline__ void barrier_arrive() {
  static_assert(kId >= 1 && kId <= 15 && kThreads % 32 == 0);
  asm volatile("bar.arrive %0, %1;" : : "n"(kId), "n"(kThreads) : "memory");
}

// ---- copies from global to shared memory -------------------------------------------------------

// Starts to copy `bytes` of kBytes, 4, 8 or 16; the rest becomes zero. Both addresses are aligned
// to kBytes, and `from` is not read where bytes = 0. Done once this thread has waited for its
// group; the other threads see it after a barrier behind that.
template <int kBytes>
__device__ __forceinline__ void cp_async(void* to, const void* from, int bytes = kBytes) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  const auto address = __cvta_generic_to_global(from);
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(shared_address(to)), "l"(address), "r"(bytes)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;"
                 :
                 : "r"(shared_address(to)), "l"(address), "r"(bytes), "n"(kBytes)
                 : "memory");
}

// Makes this thread's copies since the last commit one group, which may be empty.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" : : : "memory");
}

// Waits until at most kPending of this thread's groups, the last ones, are not done.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" : : "n"(kPending) : "memory");
}

// ---- matrix fragments: all lanes take part -----------------------------------------------------

// Loads 8x8 matrices of 16-bit elements from shared memory. Lane 8 i + r gives the address of row r
// of matrix i, 16-byte aligned; lane l receives in to[i] elements 2 (l % 4) and the next of row
// l / 4, or of column l / 4 with kTranspose. With two matrices the addresses of lanes 16 to 31 are
// not read from.
template <bool kTranspose, int kMatrices>
__device__ __forceinline__ void ldmatrix(uint32_t (&to)[kMatrices], const void* row) {
  static_assert(kMatrices == 2 || kMatrices == 4);
  const uint32_t address = shared_address(row);
  if constexpr (kMatrices == 2 && kTranspose)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1])
                 : "r"(address)
                 : "memory");
  else if constexpr (kMatrices == 2)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1])
                 : "r"(address)
                 : "memory");
  else if constexpr (kTranspose)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

// d += a b for a 16x16 tile of a, a 16x8 tile of b and FP32 sums; T is __half or __nv_bfloat16.
// With g = lane / 4 and t = 2 (lane % 4), two elements a register:
//   a[i]  row g + 8 (i % 2), columns t + 8 (i / 2) and the next: ldmatrix of a's rows
//   b[i]  rows t + 8 i and the next, column g: ldmatrix of b's columns
//   d[i]  row g + 8 (i / 2), column t + i % 2
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, __half>)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else
    static_assert(sizeof(T) == 0, "__half or __nv_bfloat16");
}

}  // namespace amp_ext::ptx
