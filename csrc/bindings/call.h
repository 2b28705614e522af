#pragma once

#include <pybind11/pybind11.h>

namespace amp_ext {

// Adds op_caller to the module.
void bind_call(pybind11::module_& m);

}  // namespace amp_ext
