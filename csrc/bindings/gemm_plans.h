#pragma once

#include <pybind11/pybind11.h>

#include "amp_ext/gemm_plan.h"

namespace amp_ext {

// The plan of a product that gemm_serves: the one that has been forced, where it serves the product
// on this device, else the planner's.
GemmPlan chosen_plan(const GemmArgs& g, const GemmDevice& device);

// Adds gemm_tiles, gemm_plan and force_gemm_plan to the module.
void bind_gemm_plans(pybind11::module_& m);

}  // namespace amp_ext
