// Computes activations in registers.
#pragma once

#include <ptx/common.cuh>

#include "amp_ext/gemm.h"

namespace amp_ext {

// Returns x * Phi(x). The tail Phi(-|x|) is exp(-x^2 / 2) times a polynomial in
// t = 1 / (1 + 0.3 |x|). The polynomial is fitted to relative errors of 1.3e-7 up to |x| = 13.3,
// and to 1/2 at 0. The rounding of x^2 adds errors that matter where the tail is below 1e-6.
__device__ inline float gelu(float x) {
  const float t = ptx::reciprocal(1.0f + 0.3f * fabsf(x));
  float sum = 0.036098767f;
  for (const float coefficient : {-0.15894368f, 0.20931359f, -0.05637772f, 0.12997395f,
                                  0.099488445f, 0.12082177f, 0.11962488f})
    sum = sum * t + coefficient;
  const float tail = ptx::exp2(-0.72134752f * x * x) * (sum * t);
  return x * (x > 0.0f ? 1.0f - tail : tail);
}

// Returns 1 / (1 + exp(-x)). With e = exp(-|x|) this is 1 / (1 + e) for x > 0, else e / (1 + e), so
// that nothing cancels or overflows.
__device__ inline float logistic(float x) {
  const float e = ptx::exp2(-1.44269504f * fabsf(x));
  return (x > 0.0f ? 1.0f : e) * ptx::reciprocal(1.0f + e);
}

// Returns x * (1 + tanh(u)) / 2. The factor of x is the logistic function of 2 u.
__device__ inline float gelu_tanh(float x) {
  return x * logistic(1.5957691f * (x + 0.044715f * x * x * x));
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
    case Activation::gelu_tanh: each([](float v) { return gelu_tanh(v); }); break;
    case Activation::silu: each([](float v) { return v * logistic(v); }); break;
  }
}

}  // namespace amp_ext
