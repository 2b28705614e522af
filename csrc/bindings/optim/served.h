// Which parameters and gradients the kernels of the optimizers serve.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

namespace amp_ext {

// Whether a tensor of a subclass has no Python code of its own in the way of `.grad` and of ops.
bool is_plain_subclass(PyObject* object);

// Whether an object is a tensor without such code.
inline bool is_plain(PyObject* object) {
  return THPVariable_CheckExact(object) || is_plain_subclass(object);
}

// The tensor that holds a parameter's elements in this process: the parameter, or the local tensor
// of a DTensor. Null where Python code is in the way.
PyObject* held_of_subclass(PyObject* param);
inline PyObject* held_of(PyObject* param) {
  return THPVariable_CheckExact(param) ? param : held_of_subclass(param);
}

// Why they do not serve a parameter or a gradient, if so. `device` is that of the first parameter.
const char* why_not_param(const at::Tensor& param, at::Device device);
const char* why_not_grad(const at::Tensor& grad, at::Device device);

}  // namespace amp_ext
