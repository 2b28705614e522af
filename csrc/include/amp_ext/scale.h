// Defines the loss scale's update and the clip coefficient, one text for all backends.
#pragma once

#include <cstdint>

#include "amp_ext/host_device.h"

namespace amp_ext {

// Values that update_scale prepares for the next optimizer step.
struct NextStep {
  static constexpr int kInvScale = 0, kFoundInf = 1, kLastFoundInf = 2, kSize = 3;
};

// Arguments of the loss scale's update. Pointers except next_step refer to one element.
struct ScaleUpdate {
  float* scale;
  int32_t* growth_tracker;
  int32_t* hysteresis_tracker;  // remaining tolerated overflows; may be null if hysteresis is 1
  int64_t* skipped_steps;       // may be null
  float* next_step;             // NextStep; may be null
  double growth_factor;
  double backoff_factor;
  int64_t growth_interval;
  int32_t hysteresis;  // consecutive overflows before the scale backs off
  float min_scale;
  float max_scale;
};

// Computes the next loss scale from the found_infs of all optimizers and devices.
struct UpdateScaleArgs {
  ScaleUpdate update;
  const float* const* found_infs;  // a host array of device pointers
  int64_t found_inf_count;
};

constexpr int kMaxFoundInfs = 448;  // limit of the CUDA kernel's 4 KiB of parameters

// Applies factors in fp64 and rounds once, as torch._amp_update_scale_ does. The floor limits a
// backoff and the ceiling a growth; neither moves a scale already beyond it.
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

// Runs the complete update of the scale after a step.
AMP_EXT_HOST_DEVICE inline void close_step(const ScaleUpdate& a, bool overflow) {
  move_scale(a, overflow);
  if (a.next_step) {
    a.next_step[NextStep::kInvScale] = 1.0f / *a.scale;
    a.next_step[NextStep::kLastFoundInf] = a.next_step[NextStep::kFoundInf];
    a.next_step[NextStep::kFoundInf] = 0.0f;
  }
}

// Computes min(1, max_norm / (norm + 1e-6)) in fp32 as torch's clip_grads_with_norm_ does: the sum,
// its reciprocal and the product are rounded one by one. `norm` is finite.
AMP_EXT_HOST_DEVICE inline float clip_coefficient(float norm, float max_norm) {
  const float reciprocal = 1.0f / (norm + 1e-6f);
  const float coefficient = reciprocal * max_norm;
  return coefficient < 1.0f ? coefficient : 1.0f;
}

}  // namespace amp_ext
