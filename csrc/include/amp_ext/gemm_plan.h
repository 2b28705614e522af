// The planner of the GEMM kernels: from the shape of a product to a kernel, a tile, splits and an
// order.
#pragma once

#include "amp_ext/gemm_describe.h"
#include "amp_ext/gemm_plan_sm80.h"
#include "amp_ext/gemm_plan_sm90.h"
#include "amp_ext/gemm_serves.h"

namespace amp_ext {

struct GemmDevice {
  int multiprocessors;
  bool sm90;  // runs code for sm_90a, and the build has it
};

// The plan of a product that gemm_serves.
inline GemmPlan plan_gemm(const GemmArgs& g, const GemmDevice& device) {
  if (device.sm90 && gemm_serves_sm90(g)) return plan_sm90(g, device.multiprocessors);
  return plan_sm80(g, device.multiprocessors);
}

}  // namespace amp_ext
