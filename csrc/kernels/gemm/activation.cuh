// Activations of one number, and their derivatives.
#pragma once

#include "amp_ext/launch.h"

namespace amp_ext {

// Phi(x), the normal distribution. erfc keeps what 1 + erf would cancel.
__device__ inline float normal_cdf(float x) { return 0.5f * erfcf(x * -0.70710678f); }

// gelu_tanh's approximation of it, (1 + tanh(u)) / 2, as 1 / (1 + exp(-2 u)) for the same reason.
__device__ inline float normal_cdf_tanh(float x) {
  const float twice_u = 1.5957691f * (x + 0.044715f * x * x * x);
  return 1.0f / (1.0f + expf(-twice_u));
}

__device__ inline float activate(Activation activation, float x) {
  switch (activation) {
    case Activation::none: return x;
    case Activation::relu: return x <= 0.0f ? 0.0f : x;
    case Activation::gelu: return x * normal_cdf(x);
    case Activation::gelu_tanh: return x * normal_cdf_tanh(x);
  }
  return x;
}

// x times the derivative at `at`.
__device__ inline float times_derivative(Activation activation, float x, float at) {
  // Where the functions' slopes are constant, so that nothing overflows.
  const float bounded = fminf(fmaxf(at, -16.0f), 16.0f);
  switch (activation) {
    case Activation::none: return x;
    case Activation::relu: return at <= 0.0f ? 0.0f : x;
    case Activation::gelu: {
      const float density = 0.39894228f * expf(-0.5f * bounded * bounded);
      return x * (normal_cdf(at) + bounded * density);
    }
    case Activation::gelu_tanh: {
      const float cdf = normal_cdf_tanh(at);
      const float slope = 1.5957691f * (1.0f + 3 * 0.044715f * bounded * bounded);
      return x * (cdf + bounded * cdf * (1.0f - cdf) * slope);
    }
  }
  return x;
}

}  // namespace amp_ext
