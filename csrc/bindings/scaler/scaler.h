#pragma once

#include <pybind11/pybind11.h>

namespace amp_ext {

// Adds unscale_grads, unscale_grads_by, check_grads, clip_grads and update_scale to the module.
void bind_scaler(pybind11::module_& m);

}  // namespace amp_ext
