// How far gradients are scaled down for their norm, one text for both backends so that they agree
// bit for bit.
#pragma once

#include "amp_ext/host_device.h"

namespace amp_ext {

// min(1, max_norm / (norm + 1e-6)) as torch's clip_grads_with_norm_ forms it in fp32, each
// operation rounded: the sum, its reciprocal, and that times max_norm. `norm` is finite.
AMP_EXT_HOST_DEVICE inline float clip_coefficient(float norm, float max_norm) {
  const float reciprocal = 1.0f / (norm + 1e-6f);
  const float coefficient = reciprocal * max_norm;
  return coefficient < 1.0f ? coefficient : 1.0f;
}

}  // namespace amp_ext
