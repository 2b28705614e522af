// How the loss scale moves and how far gradients are clipped, one text for all backends so that
// they agree bit for bit.
#pragma once

#include <cstdint>

#include "amp_ext/host_device.h"

namespace amp_ext {

// What the steps of an optimizer read, which an update makes ready for the next one.
struct NextStep {
  static constexpr int kInvScale = 0, kFoundInf = 1, kLastFoundInf = 2, kSize = 3;
};

// How a loss scale moves after a step. Pointers are to one element each, except next_step.
struct ScaleUpdate {
  float* scale;
  int32_t* growth_tracker;
  int32_t* hysteresis_tracker;  // overflows still to be tolerated; may be null when hysteresis is 1
  int64_t* skipped_steps;       // may be null
  float* next_step;             // NextStep, may be null
  double growth_factor;
  double backoff_factor;
  int64_t growth_interval;
  int32_t hysteresis;  // consecutive overflows before the scale backs off
  float min_scale;
  float max_scale;
};

// The next loss scale, from the found_infs of all optimizers and devices.
struct UpdateScaleArgs {
  ScaleUpdate update;
  const float* const* found_infs;  // host array of pointers
  int64_t found_inf_count;
};

constexpr int kMaxFoundInfs = 448;  // cuda: they travel in the kernel's parameters, of 4 KiB

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

AMP_EXT_HOST_DEVICE inline void move_scale(const ScaleUpdate& a, bool overflow) {
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

// All of an update.
AMP_EXT_HOST_DEVICE inline void close_step(const ScaleUpdate& a, bool overflow) {
  move_scale(a, overflow);
  if (a.next_step) {
    a.next_step[NextStep::kInvScale] = 1.0f / *a.scale;
    a.next_step[NextStep::kLastFoundInf] = a.next_step[NextStep::kFoundInf];
    a.next_step[NextStep::kFoundInf] = 0.0f;
  }
}

// min(1, max_norm / (norm + 1e-6)) as torch's clip_grads_with_norm_ computes it in fp32, each
// operation rounded: the sum, its reciprocal, and that times max_norm. `norm` is finite.
AMP_EXT_HOST_DEVICE inline float clip_coefficient(float norm, float max_norm) {
  const float reciprocal = 1.0f / (norm + 1e-6f);
  const float coefficient = reciprocal * max_norm;
  return coefficient < 1.0f ? coefficient : 1.0f;
}

}  // namespace amp_ext
