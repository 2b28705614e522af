#pragma once

#include <pybind11/pybind11.h>

namespace amp_ext {

// Adds Snapshot, set_grads and sum_of_versions to the module.
void bind_graph(pybind11::module_& m);

}  // namespace amp_ext
