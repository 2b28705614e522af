// Computes activations and their derivatives in registers.
#pragma once

#include <ptx/common.cuh>

#include "amp_ext/gemm.h"

namespace amp_ext {

// exp(-x^2 / 2) and Phi(-|x|), the tail of the normal distribution.
struct Normal {
  float bell, tail;

  // The tail is the bell times a polynomial in t = 1 / (1 + 0.3 |x|), fitted to relative errors of
  // 1.3e-7 up to |x| = 13.3, and to 1/2 at 0. The rounding of x^2 adds errors that matter where the
  // tail is below 1e-6.
  __device__ explicit Normal(float x) : bell(ptx::exp2(-0.72134752f * x * x)) {
    const float t = ptx::reciprocal(1.0f + 0.3f * fabsf(x));
    float sum = 0.036098767f;
    for (const float coefficient : {-0.15894368f, 0.20931359f, -0.05637772f, 0.12997395f,
                                    0.099488445f, 0.12082177f, 0.11962488f})
      sum = sum * t + coefficient;
    tail = bell * (sum * t);
  }

  __device__ float cdf(float x) const { return x > 0.0f ? 1.0f - tail : tail; }
  __device__ float density() const { return 0.39894228f * bell; }
};

__device__ inline float gelu(float x) { return x * Normal(x).cdf(x); }

__device__ inline float gelu_slope(float x) {
  const Normal normal(x);
  return normal.cdf(x) + x * normal.density();
}

// exp(-|x|).
__device__ inline float decay(float x) { return ptx::exp2(-1.44269504f * fabsf(x)); }

// 1 / (1 + exp(-x)) and its derivative, by e = exp(-|x|). The value is 1 / (1 + e) for x > 0, else
// e / (1 + e), so that nothing cancels or overflows.
__device__ inline float logistic(float x) {
  const float e = decay(x);
  return (x > 0.0f ? 1.0f : e) * ptx::reciprocal(1.0f + e);
}

__device__ inline float logistic_density(float x) {
  const float e = decay(x), r = ptx::reciprocal(1.0f + e);
  return e * r * r;
}

// gelu_tanh's Phi(x), (1 + tanh(u)) / 2, and its derivative.
__device__ inline float twice_u(float x) { return 1.5957691f * (x + 0.044715f * x * x * x); }

__device__ inline float normal_cdf_tanh(float x) { return logistic(twice_u(x)); }

__device__ inline float normal_density_tanh(float x) {
  return logistic_density(twice_u(x)) * 1.5957691f * (1.0f + 3 * 0.044715f * x * x);
}

// Computes x = f(x).
template <int kSize>
__device__ void activate(Activation activation, float (&x)[kSize]) {
  const auto each = [&](auto f) {
#pragma unroll
    for (float& value : x) value = f(value);
  };
  switch (activation) {
    case Activation::none: break;
    case Activation::relu: each([](float v) { return v <= 0.0f ? 0.0f : v; }); break;
    case Activation::gelu: each([](float v) { return gelu(v); }); break;
    case Activation::gelu_tanh: each([](float v) { return v * normal_cdf_tanh(v); }); break;
    case Activation::silu: each([](float v) { return v * logistic(v); }); break;
  }
}

// Computes x = x * f'(at).
template <int kSize>
__device__ void multiply_by_derivative(Activation activation, const float (&at)[kSize],
                                       float (&x)[kSize]) {
  const auto each = [&](auto f) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      // Beyond the bounds the derivatives are 0 and 1, and squares would overflow. NaN propagates:
      // fminf and fmaxf would drop it, and comparisons alone would become branches.
      const float bounded = fminf(fmaxf(at[i], -128.0f), 128.0f);
      x[i] = f(x[i], at[i] == at[i] ? bounded : at[i]);
    }
  };
  switch (activation) {
    case Activation::none: break;
    case Activation::relu: each([](float v, float at) { return at <= 0.0f ? 0.0f : v; }); break;
    case Activation::gelu: each([](float v, float at) { return v * gelu_slope(at); }); break;
    case Activation::gelu_tanh:
      each([](float v, float at) {
        return v * (normal_cdf_tanh(at) + at * normal_density_tanh(at));
      });
      break;
    case Activation::silu:
      each([](float v, float at) { return v * (logistic(at) + at * logistic_density(at)); });
      break;
  }
}

}  // namespace amp_ext
