#include "checks/dtensor.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/python_variable.h>

namespace py = pybind11;

namespace amp_ext {
namespace {

bool is_equal(py::handle a, py::handle b) { return a.is(b) || a.equal(b); }

// Returns null before torch.distributed.tensor is imported; there is no DTensor then.
PyObject* class_of_dtensors() {
  static PyObject* found = nullptr;  // never freed, as the interpreter may end first
  if (found) return found;
  const py::dict modules = py::module_::import("sys").attr("modules");
  const py::str name("torch.distributed.tensor");
  if (!modules.contains(name) || !py::hasattr(modules[name], "DTensor")) return nullptr;
  return found = py::object(modules[name].attr("DTensor")).release().ptr();
}

}  // namespace

bool is_dtensor(PyObject* object) {
  if (!THPVariable_Check(object) || THPVariable_CheckExact(object)) return false;
  if (!THPVariable_Unpack(object).unsafeGetTensorImpl()->is_python_dispatch()) return false;
  PyObject* const dtensor = class_of_dtensors();
  return dtensor && PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(dtensor));
}

PyObject* local_of(PyObject* dtensor) {
  const py::object local = py::handle(dtensor).attr("_local_tensor");
  if (THPVariable_CheckExact(local.ptr()) || !py::hasattr(local, "trigger_wait"))
    return local.ptr();
  local.attr("trigger_wait")();
  return py::object(local.attr("elem")).ptr();
}

bool Sharding::operator==(const Sharding& other) const {
  return is_equal(mesh, other.mesh) && is_equal(placements, other.placements);
}

bool Sharding::has_partial() const {
  for (const py::handle placement : placements) {
    if (placement.attr("is_partial")().cast<bool>()) return true;
  }
  return false;
}

Sharding sharding_of(PyObject* dtensor) {
  const py::object spec = py::handle(dtensor).attr("_spec");
  return {spec.attr("mesh"), spec.attr("placements")};
}

bool redistribute_grad(PyObject* param) {
  const py::object grad = py::handle(param).attr("grad");
  if (!is_dtensor(grad.ptr())) return false;
  const Sharding wanted = sharding_of(param), has = sharding_of(grad.ptr());
  if (!is_equal(wanted.mesh, has.mesh)) return false;
  if (is_equal(wanted.placements, has.placements)) return true;
  const at::NoGradGuard no_grad;
  py::handle(param).attr("grad") =
      grad.attr("detach")().attr("redistribute")(wanted.mesh, wanted.placements);
  return true;
}

}  // namespace amp_ext
