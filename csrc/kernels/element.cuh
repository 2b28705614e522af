// Defines per element type: compute type, rounding, the finiteness test and 16-byte packs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "amp_ext/dtype.h"

namespace amp_ext {

template <class T>
struct Element;

template <>
struct Element<float> {
  using Compute = float;
  __device__ static float widen(float x) { return x; }
  __device__ static float round(float x) { return x; }
  __device__ static bool finite(float x) {
    return (__float_as_uint(x) & 0x7fffffffu) < 0x7f800000u;
  }
};

template <>
struct Element<double> {
  using Compute = double;
  __device__ static double widen(double x) { return x; }
  __device__ static double round(double x) { return x; }
  __device__ static bool finite(double x) {
    return (__double_as_longlong(x) & INT64_MAX) < 0x7ff0000000000000ll;
  }
};

template <>
struct Element<__half> {
  using Compute = float;
  __device__ static float widen(__half x) { return __half2float(x); }
  __device__ static __half round(float x) { return __float2half_rn(x); }
  __device__ static bool finite(__half x) { return (__half_as_ushort(x) & 0x7fffu) < 0x7c00u; }
};

template <>
struct Element<__nv_bfloat16> {
  using Compute = float;
  __device__ static float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
  __device__ static __nv_bfloat16 round(float x) { return __float2bfloat16_rn(x); }
  __device__ static bool finite(__nv_bfloat16 x) {
    return (__bfloat16_as_ushort(x) & 0x7fffu) < 0x7f80u;
  }
};

// Calls use(T()) for the element type, which is not fp64.
template <class Use>
__device__ void with_type(DType dtype, Use use) {
  if (dtype == DType::f32) return use(float());
  if (dtype == DType::f16) return use(__half());
  use(__nv_bfloat16());
}

// The elements of one 16-byte access.
template <class T>
struct Pack {
  static constexpr int kSize = 16 / sizeof(T);
  T at[kSize];

  __device__ static Pack from(uint4 bits) {
    Pack pack;
    memcpy(&pack, &bits, 16);
    return pack;
  }
  __device__ uint4 bits() const {
    uint4 result;
    memcpy(&result, this, 16);
    return result;
  }
};

}  // namespace amp_ext
