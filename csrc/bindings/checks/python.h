// Checks arguments of the module's functions. The dispatcher does not check them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

namespace amp_ext {

// Returns the tensor of a Python object. The object must outlive the use. Throws for anything else.
inline const at::Tensor& tensor_of(const char* name, pybind11::handle object) {
  TORCH_CHECK_TYPE(THPVariable_Check(object.ptr()), "amp_ext: ", name, " must be a tensor, got ",
                   Py_TYPE(object.ptr())->tp_name);
  return THPVariable_Unpack(object.ptr());
}

inline pybind11::object object_of(const at::Tensor& tensor) {
  return pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(tensor));
}

}  // namespace amp_ext
