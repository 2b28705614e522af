// Declares the CPU backend's arithmetic on contiguous spans, compiled once per instruction set from
// span.cpp.
#pragma once

#include <cstdint>

#include "amp_ext/dtype.h"

namespace amp_ext::cpu {

// Kernels indexed by DType. The checks return true if they met a non-finite value.
struct SpanKernels {
  // Computes data = data * inv_scale * coefficient, in this order.
  bool (*unscale[kDTypes])(void* data, int64_t n, float inv_scale, float coefficient);
  bool (*check_finite[kDTypes])(const void* data, int64_t n);
  // Returns the sum of squares of data * inv_scale. The order depends only on n and the instruction
  // set.
  double (*sum_squares[kDTypes])(const void* data, int64_t n, float inv_scale);
  // Convert to and from fp32, rounded to nearest even.
  void (*widen[kDTypes])(const void* from, int64_t n, float* to);
  void (*narrow[kDTypes])(const float* from, int64_t n, void* to);
};

// Returns the kernels of the widest instruction set that this processor runs.
const SpanKernels& span_kernels();

}  // namespace amp_ext::cpu
