// The arithmetic of the CPU backend on contiguous spans, compiled once per instruction set from
// span.cpp.
#pragma once

#include <cstdint>

#include "amp_ext/dtype.h"

namespace amp_ext::cpu {

// Each returns true when it met a non-finite value. Arrays are indexed by DType.
struct SpanKernels {
  bool (*unscale[kDTypes])(void* data, int64_t n, float inv_scale);
  bool (*check_finite[kDTypes])(const void* data, int64_t n);
  // Adds the sum of squares of data * inv_scale to *sum, in an order that depends on n and the
  // instruction set alone.
  bool (*sum_squares[kDTypes])(const void* data, int64_t n, float inv_scale, double* sum);
};

// The widest set that this processor runs.
const SpanKernels& span_kernels();

}  // namespace amp_ext::cpu
