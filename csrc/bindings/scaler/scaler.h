#pragma once

#include <pybind11/pybind11.h>

namespace amp_ext {

// Adds grad_pass and update_scale to the module.
void bind_scaler(pybind11::module_& m);

}  // namespace amp_ext
