#pragma once

#include <pybind11/pybind11.h>

namespace amp_ext {

// Adds gemm_choice, gemm_tiles, gemm_plan and force_gemm_tile to the module.
void bind_gemm(pybind11::module_& m);

}  // namespace amp_ext
