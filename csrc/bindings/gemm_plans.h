#pragma once

#include <pybind11/pybind11.h>

#include "gemm/plan/choose.h"

namespace amp_ext {

// The plan of a product that can_run_sm80: by the tile that Python has forced, where that can
// compute the product on this device, else the planner's.
GemmPlan chosen_plan(const GemmArgs& g, const GemmDevice& device);

// Adds gemm_tiles, gemm_plan and force_gemm_tile to the module.
void bind_gemm_plans(pybind11::module_& m);

}  // namespace amp_ext
