#pragma once

#include <pybind11/pybind11.h>

namespace amp_ext {

// Adds gemm_choice, force_gemm_tile and more about products to the module.
void bind_gemm(pybind11::module_& m);

}  // namespace amp_ext
