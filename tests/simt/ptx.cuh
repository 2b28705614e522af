// The functions of csrc/kernels/ptx.cuh on the CPU.
#pragma once

#include <cuda_runtime.h>

#include <bit>
#include <cstdint>

#include "simt.h"

namespace amp_ext::ptx {

// threadIdx.x, read anew at each use.
inline int thread_index() { return static_cast<int>(threadIdx.x); }

// The block's dynamic shared memory as a T. All threads see the same object; it starts
// uninitialised.
template <class T>
T& shared() {
  return *static_cast<T*>(simt::shared_memory(sizeof(T)));
}

// Tells the compiler that `pointer`, which it may have read from a table, points to global memory.
template <class T>
T* global(T* pointer) {
  if (simt::is_shared(pointer)) simt::fail("global: the pointer is one to shared memory");
  return pointer;
}

// A 16-byte load. `from` is 16-byte aligned.
inline uint4 load16(const void* from) {
  simt::load16(from);
  return *static_cast<const uint4*>(from);
}

// A 16-byte store. `to` is 16-byte aligned.
inline void store16(void* to, uint4 value) {
  simt::store16(to);
  *static_cast<uint4*>(to) = value;
}

// A load that does not come from L1: what other blocks wrote before a fence and an atomic is seen.
template <class T>
T load_l2(const T* from) {
  return *from;
}

// The value of the lane whose index differs in the bits of `mask`. All 32 lanes take part.
inline double shuffle_xor(double value, int mask) {
  const auto bits = std::bit_cast<uint64_t>(value);
  return std::bit_cast<double>(simt::warp_exchange("shuffle_xor", bits, simt::lane() ^ mask));
}

// True in every lane if `predicate` is true in one. All 32 lanes take part.
inline bool warp_any(bool predicate) { return simt::warp_or("warp_any", predicate); }

// Waits for all threads of the block; orders their shared and global memory accesses within the
// block.
inline void block_sync() { simt::block_barrier("block_sync"); }

// True in every thread if `predicate` is true in one. All threads of the block take part; orders as
// block_sync.
inline bool block_any(bool predicate) { return simt::block_or("block_any", predicate); }

// Orders this thread's earlier writes before its later ones, for every thread of the device.
inline void device_fence() { simt::fence(); }

// Adds one and returns the value before; wraps to 0 after `last`.
inline uint32_t ticket(uint32_t* counter, uint32_t last) {
  simt::order_atomic(counter);
  const uint32_t before = __atomic_load_n(counter, __ATOMIC_RELAXED);
  __atomic_store_n(counter, before >= last ? 0 : before + 1, __ATOMIC_RELAXED);
  return before;
}

// Stores a value that several threads may store at once; one of them stays.
inline void store_any(int64_t* to, int64_t value) {
  simt::order_atomic(to);
  __atomic_store_n(to, value, __ATOMIC_RELAXED);
}

inline void store_any(float* to, float value) {
  simt::order_atomic(to);
  __atomic_store(to, &value, __ATOMIC_RELAXED);
}

}  // namespace amp_ext::ptx
