#pragma once

#include <pybind11/pybind11.h>

namespace amp_ext {

// Adds what amp_ext/tune.py and amp_ext/_table.py need to the module.
void bind_tune(pybind11::module_& m);

}  // namespace amp_ext
