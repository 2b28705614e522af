// Finds tensors without Python code of their own, and tensors for the optimizers' kernels.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

namespace amp_ext {

// Returns whether an object is a tensor, and its `.grad` and ops run no Python code of its class.
bool is_plain(PyObject* object);

// Returns the tensor of a parameter's elements in this process: the parameter itself, or the local
// tensor of a DTensor. Returns null if Python code is in the way.
PyObject* local_tensor(PyObject* param);

// Return why the kernels of the optimizers do not serve a parameter or a gradient, or null.
// `device` is the first parameter's.
const char* why_not_param(const at::Tensor& param, at::Device device);
const char* why_not_grad(const at::Tensor& grad, at::Device device);

}  // namespace amp_ext
