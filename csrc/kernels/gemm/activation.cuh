// Activations of eight numbers, and their derivatives.
#pragma once

#include <ptx.cuh>

#include "vector8.cuh"

namespace amp_ext {

// Phi(x), the normal distribution. erfc keeps what 1 + erf would cancel.
__device__ inline float normal_cdf(float x) { return 0.5f * erfcf(x * -0.70710678f); }

__device__ inline float normal_density(float x) { return 0.39894228f * expf(-0.5f * x * x); }

// gelu_tanh's Phi(x), (1 + tanh(u)) / 2 with this u, as 1 / (1 + exp(-2 u)) for the same reason.
__device__ inline float normal_cdf_tanh(float x) {
  const float twice_u = 1.5957691f * (x + 0.044715f * x * x * x);
  return ptx::reciprocal(1.0f + expf(-twice_u));
}

__device__ inline float twice_u_derivative(float x) {
  return 1.5957691f * (1.0f + 3 * 0.044715f * x * x);
}

// x = f(x).
__device__ inline void activate(Activation activation, float (&x)[kVector]) {
  const auto each = [&](auto f) {
#pragma unroll
    for (float& value : x) value = f(value);
  };
  switch (activation) {
    case Activation::none: break;
    case Activation::relu: each([](float v) { return v <= 0.0f ? 0.0f : v; }); break;
    case Activation::gelu: each([](float v) { return v * normal_cdf(v); }); break;
    case Activation::gelu_tanh: each([](float v) { return v * normal_cdf_tanh(v); }); break;
  }
}

// x = x * f'(at).
__device__ inline void multiply_by_derivative(Activation activation, const float (&at)[kVector],
                                              float (&x)[kVector]) {
  const auto each = [&](auto f) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      // Far out, where the slopes are 0 and 1, so that nothing overflows.
      const float bounded = fminf(fmaxf(at[i], -16.0f), 16.0f);
      x[i] = f(x[i], at[i], bounded);
    }
  };
  switch (activation) {
    case Activation::none: break;
    case Activation::relu:
      each([](float v, float at, float) { return at <= 0.0f ? 0.0f : v; });
      break;
    case Activation::gelu:
      each([](float v, float at, float bounded) {
        return v * (normal_cdf(at) + bounded * normal_density(bounded));
      });
      break;
    case Activation::gelu_tanh:
      each([](float v, float at, float bounded) {
        const float cdf = normal_cdf_tanh(at);
        return v * (cdf + bounded * cdf * (1.0f - cdf) * twice_u_derivative(bounded));
      });
      break;
  }
}

}  // namespace amp_ext
