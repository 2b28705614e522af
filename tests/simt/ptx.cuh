// The functions of csrc/kernels/ptx.cuh on the CPU; that file says what each does. The engine's
// files define what is not a template.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
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
constexpr Element element() {
  static_assert(std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>);
  return std::is_same_v<T, __half> ? Element::half : Element::bfloat16;
}

}  // namespace simt

namespace amp_ext::ptx {

inline int thread_index() { return static_cast<int>(threadIdx.x); }
inline uint32_t block_index() { return blockIdx.x; }
inline float reciprocal(float x) { return 1.0f / x; }

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

enum class Cache { normal, streaming, read_only };

template <Cache kCache = Cache::normal>
uint4 load16(const void* from) {
  simt::load16(from);
  return *static_cast<const uint4*>(from);
}

template <Cache kCache = Cache::normal>
void store16(void* to, uint4 value) {
  static_assert(kCache != Cache::read_only);
  simt::store16(to);
  *static_cast<uint4*>(to) = value;
}

template <class T>
T load_l2(const T* from) {
  return *from;
}

void device_fence();

inline uint32_t ticket(uint32_t* counter, uint32_t last) {
  simt::order_atomic(counter);
  const uint32_t before = __atomic_load_n(counter, __ATOMIC_RELAXED);
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

void add_release(uint32_t* counter, uint32_t value);
void wait_acquire(const uint32_t* counter, uint32_t value);

template <class T>
T shuffle_xor(T value, int mask) {
  return simt::value_of_lane("shuffle_xor", value, simt::lane() ^ mask);
}

template <class T>
T shuffle(T value, int lane) {
  return simt::value_of_lane("shuffle", value, lane);
}

bool warp_any(bool predicate);
uint32_t warp_ballot(bool predicate);
uint32_t warp_max(uint32_t value);
void warp_sync();

void block_sync();
bool block_any(bool predicate);

template <int kId, int kThreads>
void barrier_sync() {
  static_assert(kId >= 1 && kId <= 15 && kThreads % 32 == 0);
  simt::named_barrier(kId, kThreads, true);
}

template <int kId, int kThreads>
void barrier_arrive() {
  static_assert(kId >= 1 && kId <= 15 && kThreads % 32 == 0);
  simt::named_barrier(kId, kThreads, false);
}

template <int kBytes>
void cp_async(void* to, const void* from, int bytes = kBytes) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  simt::cp_async(to, from, bytes, kBytes);
}

void cp_async_commit();

template <int kPending>
void cp_async_wait() {
  simt::cp_async_wait(kPending);
}

template <bool kTranspose, int kMatrices>
void ldmatrix(uint32_t (&to)[kMatrices], const void* row) {
  static_assert(kMatrices == 2 || kMatrices == 4);
  simt::move_matrices({false, kTranspose, kMatrices}, const_cast<void*>(row), to);
}

template <class T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  simt::mma(simt::element<T>(), d, a, b);
}

}  // namespace amp_ext::ptx
