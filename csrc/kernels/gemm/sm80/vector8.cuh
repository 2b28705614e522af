// Loads and stores eight neighbours of a row whose type is known at run time. Contiguous aligned
// elements move 16 bytes at a time, others one by one.
#pragma once

#include <cstdint>
#include <ptx/common.cuh>

#include "amp_ext/gemm.h"
#include "element.cuh"

namespace amp_ext {

constexpr int kVector = 8;

// The position of eight elements, and how many of them exist.
struct VectorPlace {
  int64_t batch;
  int64_t row;
  int64_t column;
  int count;
};

// Returns a vector as a matrix of one row.
__device__ inline MatrixRef row_of(const VectorRef& x) { return {x.data, x.dtype, 0, 0, 1}; }

// Calls use(T*) with the address of the place's first element. The type is not fp64.
template <class Use>
__device__ void with_place(const MatrixRef& matrix, const VectorPlace& place, Use use) {
  const int64_t index = place.batch * matrix.batch_stride + place.row * matrix.row_stride +
                        place.column * matrix.column_stride;
  void* const data = ptx::global(matrix.data);
  if (matrix.dtype == DType::f32) return use(static_cast<float*>(data) + index);
  if (matrix.dtype == DType::f16) return use(static_cast<__half*>(data) + index);
  use(static_cast<__nv_bfloat16*>(data) + index);
}

template <class T>
__device__ bool is_whole(const T* at, const VectorPlace& place) {
  return place.count == kVector && reinterpret_cast<uintptr_t>(at) % 16 == 0;
}

// Loads eight elements; missing elements become 0.
__device__ inline void load_vector(float (&to)[kVector], const MatrixRef& matrix,
                                   const VectorPlace& place) {
  with_place(matrix, place, [&](auto* at) {
    using T = std::remove_pointer_t<decltype(at)>;
    constexpr int kPack = Pack<T>::kSize;
    if (matrix.column_stride == 1 && is_whole(at, place)) {
#pragma unroll
      for (int i = 0; i < kVector; i += kPack) {
        const auto pack = Pack<T>::from(ptx::load16(at + i));
#pragma unroll
        for (int j = 0; j < kPack; ++j) to[i + j] = Element<T>::widen(pack.at[j]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        to[i] = i < place.count ? Element<T>::widen(at[i * matrix.column_stride]) : 0.0f;
    }
  });
}

// Rounds and stores the existing elements. column_stride is 1.
__device__ inline void store_vector(const MatrixRef& matrix, const VectorPlace& place,
                                    const float (&from)[kVector]) {
  with_place(matrix, place, [&](auto* at) {
    using T = std::remove_pointer_t<decltype(at)>;
    constexpr int kPack = Pack<T>::kSize;
    T rounded[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) rounded[i] = Element<T>::round(from[i]);
    if (is_whole(at, place)) {
#pragma unroll
      for (int i = 0; i < kVector; i += kPack) {
        Pack<T> pack;
#pragma unroll
        for (int j = 0; j < kPack; ++j) pack.at[j] = rounded[i + j];
        ptx::store16(at + i, pack.bits());
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        if (i < place.count) at[i] = rounded[i];
    }
  });
}

}  // namespace amp_ext
