#pragma once

#include <pybind11/pybind11.h>

namespace amp_ext {

// Adds Snapshot and set_grads to the module.
void bind_graph(pybind11::module_& m);

}  // namespace amp_ext
