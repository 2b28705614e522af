#include "params/params.h"

namespace py = pybind11;

namespace amp_ext {

Params::Params(py::handle param_groups) {
  for (const py::handle group : param_groups) {
    const py::object params = group[py::str("params")];
    auto list =
        py::reinterpret_steal<py::object>(PySequence_Fast(params.ptr(), "params must be iterable"));
    if (!list) throw py::error_already_set();
    PyObject** const objects = PySequence_Fast_ITEMS(list.ptr());
    const auto n = static_cast<size_t>(PySequence_Fast_GET_SIZE(list.ptr()));
    groups_.push_back({std::move(list), all_.size(), n});
    all_.insert(all_.end(), objects, objects + n);
  }
}

std::vector<py::object> Params::owners() const {
  std::vector<py::object> result;
  for (PyObject* const param : all_) result.push_back(py::reinterpret_borrow<py::object>(param));
  return result;
}

}  // namespace amp_ext
