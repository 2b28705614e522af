// The functions of csrc/kernels/ptx/common.cuh on the CPU; that file says what each does. The
// engine's files define what is not a template.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simt.h"

namespace simt {

template <class T>
T value_of_lane(const char* operation, T value, int lane) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(uint64_t));
  if (lane < 0 || lane >= 32) fail("%s: reads lane %d of 32", operation, lane);
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  memcpy(&value, warp_values(operation, bits) + lane, sizeof(T));
  return value;
}

template <class T>
T load_as(const void* from) {
  load(from, sizeof(T));
  return *static_cast<const T*>(from);
}

template <class T>
void store_as(void* to, T value) {
  store(to, sizeof(T));
  *static_cast<T*>(to) = value;
}

}  // namespace simt

namespace amp_ext::ptx {

inline int thread_index() { return static_cast<int>(threadIdx.x); }
inline uint32_t block_index() { return blockIdx.x; }
inline float reciprocal(float x) { return 1.0f / x; }

inline uint32_t reversed_bits(uint32_t x) {
  uint32_t result = 0;
  for (int i = 0; i < 32; ++i, x >>= 1) result = result << 1 | (x & 1);
  return result;
}

template <class T>
T& shared() {
  return *static_cast<T*>(simt::shared_memory(sizeof(T)));
}

uint32_t shared_address(const void* pointer);

template <class T>
void store_shared(T* to, T value) {
  simt::wrote_shared(to, sizeof(T));
  *to = value;
}

template <class T>
T* global(T* pointer) {
  if (simt::is_shared(pointer)) simt::fail("global: the pointer is one to shared memory");
  return pointer;
}

inline uint4 load16(const void* from) { return simt::load_as<uint4>(from); }
inline uint2 load8(const void* from) { return simt::load_as<uint2>(from); }
inline void store16(void* to, uint4 value) { simt::store_as(to, value); }
inline void store8(void* to, uint2 value) { simt::store_as(to, value); }

template <class T>
T load_l2(const T* from) {
  return *from;
}

void wait_for_previous_grid();
inline void let_next_grid_begin() {}

void device_fence();

inline uint32_t look(const uint32_t* counter) {
  simt::order_atomic(const_cast<uint32_t*>(counter));
  return __atomic_load_n(counter, __ATOMIC_RELAXED);
}

inline uint32_t ticket(uint32_t* counter, uint32_t last) {
  const uint32_t before = look(counter);
  __atomic_store_n(counter, before >= last ? 0 : before + 1, __ATOMIC_RELAXED);
  return before;
}

inline void store_any(int64_t* to, int64_t value) {
  simt::order_atomic(to);
  __atomic_store_n(to, value, __ATOMIC_RELAXED);
}

inline void store_any(float* to, float value) {
  simt::order_atomic(to);
  __atomic_store(to, &value, __ATOMIC_RELAXED);
}

template <class T>
T shuffle_xor(T value, int mask) {
  return simt::value_of_lane("shuffle_xor", value, simt::lane() ^ mask);
}

inline int warp_uniform(int value) { return simt::value_of_lane("warp_uniform", value, 0); }

bool warp_any(bool predicate);
int warp_count(bool predicate);
void warp_sync();

void block_sync();
bool block_any(bool predicate);

template <int kId, int kThreads>
void barrier_sync() {
  static_assert(kId >= 1 && kId <= 15 && kThreads % 32 == 0);
  simt::named_barrier(kId, kThreads);
}

}  // namespace amp_ext::ptx
