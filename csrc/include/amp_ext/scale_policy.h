// The loss scale's rule of growth and backoff, one text for both backends so that they agree bit
// for bit.
#pragma once

#include <cstdint>

#include "amp_ext/host_device.h"
#include "amp_ext/launch.h"

namespace amp_ext {

// Factors are applied in fp64 and rounded once, as torch._amp_update_scale_ does. The floor stops a
// backoff and the ceiling stops a growth; neither moves a scale that already lies beyond it.
AMP_EXT_HOST_DEVICE inline float backed_off(float scale, double factor, float floor) {
  const float next = static_cast<float>(scale * factor);
  const float lowest = scale < floor ? scale : floor;
  return next < lowest ? lowest : next;
}

AMP_EXT_HOST_DEVICE inline float grown(float scale, double factor, float ceiling) {
  constexpr float kMaxFinite = 3.402823466e+38f;
  const float next = static_cast<float>(scale * factor);
  const float highest = scale > ceiling ? scale : ceiling;
  if (!(next >= -kMaxFinite && next <= kMaxFinite)) return scale;
  return next > highest ? highest : next;
}

AMP_EXT_HOST_DEVICE inline void update_scale(const UpdateScaleArgs& a, bool overflow) {
  if (!overflow) {
    if (a.hysteresis_tracker) *a.hysteresis_tracker = a.hysteresis;
    const int64_t tracker = static_cast<int64_t>(*a.growth_tracker) + 1;
    const bool grow = tracker >= a.growth_interval;
    if (grow) *a.scale = grown(*a.scale, a.growth_factor, a.max_scale);
    *a.growth_tracker = grow ? 0 : static_cast<int32_t>(tracker);
    return;
  }
  if (a.skipped_steps) *a.skipped_steps += 1;
  *a.growth_tracker = 0;
  if (a.hysteresis > 1 && --*a.hysteresis_tracker > 0) return;
  *a.scale = backed_off(*a.scale, a.backoff_factor, a.min_scale);
}

}  // namespace amp_ext
