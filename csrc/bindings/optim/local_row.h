// Rows of parameters that are DTensors: kernels update what each process holds of them.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "optim/param_table.h"

namespace amp_ext {

// Replaces the gradient of a DTensor's row, and the objects of its state, by their local tensors.
// An object becomes null that is not placed as the parameter. Returns why kernels do not serve the
// row, if so. `is_placed` becomes false, and no row is to be made, where spread_grad_as_param is to
// be called first.
const char* localize(PyObject* param, const std::vector<state::Name>& needed, ParamRow& row,
                     StateObjects& objects, bool& is_placed);

}  // namespace amp_ext
