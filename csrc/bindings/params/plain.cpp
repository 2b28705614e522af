#include "params/plain.h"

#include "checks/dtensor.h"

namespace py = pybind11;

namespace amp_ext {

bool is_plain(PyObject* object) {
  if (THPVariable_CheckExact(object)) return true;
  if (!THPVariable_Check(object)) return false;
  const auto type = py::type::handle_of(object);
  const py::handle tensor(THPVariableClass), parameter(ParameterClass);
  const py::object function = type.attr("__torch_function__");
  const auto is_tensors = [&] {
    return py::hasattr(function, "__func__") &&
           function.attr("__func__").is(tensor.attr("__torch_function__").attr("__func__"));
  };
  return !THPVariable_Unpack(object).unsafeGetTensorImpl()->is_python_dispatch() &&
         type.attr("grad").is(tensor.attr("grad")) &&
         (function.is(parameter.attr("__torch_function__")) || is_tensors());
}

PyObject* local_tensor(PyObject* param) {
  if (THPVariable_CheckExact(param)) return param;  // no subclass, and so no DTensor
  PyObject* const local = is_dtensor(param) ? local_of(param) : param;
  return is_plain(local) ? local : nullptr;
}

const char* why_not_grad(const at::Tensor& tensor, at::Device device) {
  const at::ScalarType type = tensor.scalar_type();
  if (tensor.unsafeGetTensorImpl()->is_python_dispatch()) return "is a tensor subclass";
  if (tensor.layout() != at::kStrided) return "is not strided";
  if (type != at::kFloat && type != at::kHalf && type != at::kBFloat16)
    return "is not float32, float16 or bfloat16";
  if (tensor.device() != device) return "is on another device than the first parameter";
  return nullptr;
}

const char* why_not_param(const at::Tensor& param, at::Device device) {
  if (const char* why = why_not_grad(param, device)) return why;
  if (!device.is_cpu() && !device.is_cuda()) return "is neither on the CPU nor on a CUDA device";
  return param.is_non_overlapping_and_dense() ? nullptr : "has holes in memory";
}

}  // namespace amp_ext
