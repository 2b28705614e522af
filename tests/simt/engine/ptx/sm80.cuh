// The functions of csrc/kernels/ptx/sm80.cuh on the CPU; that file says what each does.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <ptx/common.cuh>
#include <type_traits>

#include "simt.h"

namespace simt {

template <class T>
constexpr Element element() {
  static_assert(std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>);
  return std::is_same_v<T, __half> ? Element::half : Element::bfloat16;
}

}  // namespace simt

namespace amp_ext::ptx {

inline void cp_async16(void* to, const void* from, int bytes = 16) {
  simt::cp_async16(to, from, bytes);
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
