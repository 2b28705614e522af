// The arithmetic of the CPU backend on contiguous spans, compiled once per instruction set from
// span.cpp.
#pragma once

#include <cstdint>

#include "amp_ext/dtype.h"

namespace amp_ext::cpu {

// Arrays are indexed by DType. The checks return true when they met a non-finite value.
struct SpanKernels {
  // data = data * inv_scale * coefficient, in this order.
  bool (*unscale[kDTypes])(void* data, int64_t n, float inv_scale, float coefficient);
  bool (*check_finite[kDTypes])(const void* data, int64_t n);
  // Adds the sum of squares of data * inv_scale to *sum, in an order that depends on n and the
  // instruction set alone.
  bool (*sum_squares[kDTypes])(const void* data, int64_t n, float inv_scale, double* sum);
  // Conversions to and from fp32, rounded to nearest even.
  void (*widen[kDTypes])(const void* from, int64_t n, float* to);
  void (*narrow[kDTypes])(const float* from, int64_t n, void* to);
};

// The widest set that this processor runs.
const SpanKernels& span_kernels();

}  // namespace amp_ext::cpu
