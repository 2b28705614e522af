// Defines the arguments and the arithmetic of the Adam and SGD updates.
//
// All backends compile this text, without fused multiply-adds, and therefore agree bit for bit. The
// formulas follow torch/optim/adam.py and sgd.py. Elements are computed in fp32, and values shared
// by all elements of a tensor once, in fp64.
#pragma once

#include <math.h>

#include <cstdint>
#include <cstring>

#include "amp_ext/host_device.h"
#include "amp_ext/lists.h"
#include "amp_ext/scale.h"

// Has internal linkage, so that each instruction set of the CPU keeps its own copy.
#define AMP_EXT_ARITHMETIC AMP_EXT_HOST_DEVICE static inline

namespace amp_ext {

// A parameter with its gradient and state, all dense and in the same element order. Pointers to
// absent tensors are null.
struct UpdateRef {
  void* param;
  const void* grad;
  void* exp_avg;  // SGD: the momentum buffer
  void* exp_avg_sq;
  void* max_exp_avg_sq;  // has the dtype of exp_avg_sq
  void* copy;            // 16 bits: replaces elements of the fp32 param that do not round to it,
                         // then receives the updated param
  float* step;           // counts the parameter's updates; null for all or for none
  DType param_dtype;
  DType grad_dtype;
  DType exp_avg_dtype;
  DType exp_avg_sq_dtype;
  DType copy_dtype;
  int64_t numel;
  uint32_t first_chunk;
  uint32_t place;  // of the parameter in its group, for stochastic rounding

  friend bool operator==(const UpdateRef&, const UpdateRef&) = default;
};

using UpdateList = ListOf<UpdateRef>;

// The scalars of a step, one element each. All pointers may be null.
struct StepScalars {
  const float* lr;         // overrides options.lr
  float* found_inf;        // a nonzero value skips the update
  const float* inv_scale;  // multiplies the gradients
  const float* norm;       // of the unscaled gradients; a non-finite norm sets found_inf
  float max_norm;          // clips the norm
};

struct AdamOptions {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  bool decoupled;  // selects AdamW's weight decay
  bool maximize;
  bool stochastic_rounding;  // applies to bf16 params and moments
};

struct AdamArgs {
  UpdateList list;
  AdamOptions options;
  StepScalars scalars;
};

struct SgdOptions {
  double lr;
  double momentum;
  double dampening;
  double weight_decay;
  bool nesterov;
  bool maximize;
  bool stochastic_rounding;
};

// Arguments of the SGD update. exp_avg is null if momentum is 0. If there are steps, the first
// update of a parameter sets its momentum buffer to the gradient.
struct SgdArgs {
  UpdateList list;
  SgdOptions options;
  StepScalars scalars;
};

inline bool has_steps(const UpdateList& list) { return list.size > 0 && list.refs[0].step; }

// ---- the scalars of a step ---------------------------------------------------------------------

AMP_EXT_ARITHMETIC bool has_bad_norm(const StepScalars& s) {
  return s.norm && !(*s.norm - *s.norm == 0.0f);
}

// Returns whether found_inf skips the step. Call only after has_bad_norm() returned false:
// otherwise another thread may be writing found_inf.
AMP_EXT_ARITHMETIC bool is_skipped(const StepScalars& s) {
  return s.found_inf && *s.found_inf != 0.0f;
}

struct StepFactors {
  double lr;
  float inv_scale;
  float coefficient;  // clip coefficient, negated to maximize
};

AMP_EXT_ARITHMETIC StepFactors step_factors(const StepScalars& s, double lr, bool maximize) {
  const float coefficient = s.norm ? clip_coefficient(*s.norm, s.max_norm) : 1.0f;
  return {s.lr ? *s.lr : lr, s.inv_scale ? *s.inv_scale : 1.0f,
          maximize ? -coefficient : coefficient};
}

// Returns the 1-based number of the next update after `step` updates, at most 2^30 + 1.
AMP_EXT_ARITHMETIC uint32_t update_number(float step) {
  constexpr uint32_t kMost = 1u << 30;
  if (!(step > 0)) return 1;
  return (step < static_cast<float>(kMost) ? static_cast<uint32_t>(step) : kMost) + 1;
}

// Computes base^exponent by repeated squaring.
AMP_EXT_ARITHMETIC double power(double base, uint32_t exponent) {
  double result = 1;
  for (; exponent; exponent /= 2) {
    if (exponent % 2) result *= base;
    base *= base;
  }
  return result;
}

// ---- rounding ----------------------------------------------------------------------------------

// Finalises a hash as MurmurHash3 does.
AMP_EXT_ARITHMETIC uint32_t mixed(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}

// Returns a key for the random bits of stochastic rounding. The bits depend only on the update's
// number, the parameter's place in its group, and the indices of the chunk and the element in it.
AMP_EXT_ARITHMETIC uint32_t noise_key(uint32_t update, uint32_t place, uint32_t chunk) {
  return mixed(mixed(mixed(update) + place) + chunk);
}

// Returns 32 random bits. With `pair` 0 the low half rounds the param and the high half exp_avg;
// with 1 they round exp_avg_sq and max_exp_avg_sq.
AMP_EXT_ARITHMETIC uint32_t noise(uint32_t key, uint32_t element, uint32_t pair) {
  return mixed(key + (2 * element + pair) * 0x9e3779b9u);
}

// Returns a key that gives element i the noise of element i + `elements` under `key`.
AMP_EXT_ARITHMETIC uint32_t noise_key_behind(uint32_t key, uint32_t elements) {
  return key + 2 * elements * 0x9e3779b9u;
}

// Rounds stochastically: the probability of either neighbour is linear in the distance.
AMP_EXT_ARITHMETIC uint16_t bf16_by_chance(float value, uint32_t random_bits) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7fc00000u : bits;
  return static_cast<uint16_t>((magnitude >= 0x7f800000u ? special : bits + random_bits) >> 16);
}

// ---- adam --------------------------------------------------------------------------------------

struct AdamFactors {
  float inv_scale;
  float coefficient;
  float l2;  // weight decay added to the gradient
  float beta1, rest1;
  float beta2, rest2;
  float inv_root;  // 1 / sqrt(1 - beta2^t)
  float eps;
  float keep;  // factor of the param after decoupled weight decay
  float step_size;
};

AMP_EXT_ARITHMETIC AdamFactors adam_factors(const AdamOptions& o, const StepFactors& step,
                                            uint32_t update) {
  const double correction1 = 1 - power(o.beta1, update), correction2 = 1 - power(o.beta2, update);
  return {step.inv_scale,
          step.coefficient,
          o.decoupled ? 0.0f : static_cast<float>(o.weight_decay),
          static_cast<float>(o.beta1),
          static_cast<float>(1 - o.beta1),
          static_cast<float>(o.beta2),
          static_cast<float>(1 - o.beta2),
          static_cast<float>(1 / sqrt(correction2)),
          static_cast<float>(o.eps),
          o.decoupled ? static_cast<float>(1 - step.lr * o.weight_decay) : 1.0f,
          static_cast<float>(step.lr / correction1)};
}

// Unscales, clips and decays a stored gradient. `l2` is the weight decay.
template <class Factors>
AMP_EXT_ARITHMETIC float used_gradient(const Factors& f, float grad, float param) {
  const float unscaled = grad * f.inv_scale * f.coefficient;
  return f.l2 == 0.0f ? unscaled : unscaled + f.l2 * param;
}

AMP_EXT_ARITHMETIC float next_exp_avg(const AdamFactors& f, float exp_avg, float grad) {
  return f.beta1 * exp_avg + f.rest1 * grad;
}

AMP_EXT_ARITHMETIC float next_exp_avg_sq(const AdamFactors& f, float exp_avg_sq, float grad) {
  return f.beta2 * exp_avg_sq + f.rest2 * grad * grad;
}

// Returns the larger value, or NaN if an argument is NaN.
AMP_EXT_ARITHMETIC float larger(float a, float b) { return a > b || a != a ? a : b; }

AMP_EXT_ARITHMETIC float next_param(const AdamFactors& f, float param, float exp_avg,
                                    float exp_avg_sq) {
  const float denominator = sqrtf(exp_avg_sq) * f.inv_root + f.eps;
  return param * f.keep - f.step_size * (exp_avg / denominator);
}

// ---- sgd ---------------------------------------------------------------------------------------

struct SgdFactors {
  float inv_scale;
  float coefficient;
  float l2;
  float momentum;
  float rest;  // 1 - dampening
  float lr;
  bool nesterov;
  bool is_first;  // sets the momentum buffer to the gradient
};

AMP_EXT_ARITHMETIC SgdFactors sgd_factors(const SgdOptions& o, const StepFactors& step,
                                          bool is_first) {
  return {step.inv_scale,
          step.coefficient,
          static_cast<float>(o.weight_decay),
          static_cast<float>(o.momentum),
          static_cast<float>(1 - o.dampening),
          static_cast<float>(step.lr),
          o.nesterov,
          is_first};
}

AMP_EXT_ARITHMETIC float next_momentum(const SgdFactors& f, float momentum, float grad) {
  return f.is_first ? grad : f.momentum * momentum + f.rest * grad;
}

// Returns the update's direction; `momentum` is the new buffer.
AMP_EXT_ARITHMETIC float with_lookahead(const SgdFactors& f, float momentum, float grad) {
  return f.nesterov ? grad + f.momentum * momentum : momentum;
}

AMP_EXT_ARITHMETIC float next_param(const SgdFactors& f, float param, float direction) {
  return param - f.lr * direction;
}

}  // namespace amp_ext
