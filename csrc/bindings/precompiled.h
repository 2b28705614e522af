// Includes the headers that most files of the bindings use, once for all of them. Each file
// includes its own headers nevertheless.

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <vector>
