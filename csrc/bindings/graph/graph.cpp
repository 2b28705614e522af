// What amp_ext.graph does before and after each replay, for any number of tensors.
#include "graph/graph.h"

#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <vector>

namespace py = pybind11;

namespace amp_ext {
namespace {

const void* memory_of(PyObject* tensor) {
  const at::Tensor& unpacked = THPVariable_Unpack(tensor);
  return unpacked.has_storage() ? unpacked.storage().data() : nullptr;
}

// The content of dicts and lists at one moment.
class Snapshot {
 public:
  // Of (container, keys): a list with keys None, or a dict with the keys of interest, None for all.
  // Strings, numbers and tuples are compared by value, tensors by identity, memory and whether they
  // require a gradient, and anything else by identity.
  explicit Snapshot(const py::iterable& contents) {
    for (const py::handle pair : contents) {
      Container container{py::reinterpret_borrow<py::object>(pair[py::int_(0)]), true, {}};
      const py::object keys = pair[py::int_(1)];
      if (!keys.is_none()) {
        container.whole = false;
        for (const py::handle key : keys) container.items.emplace_back(key, container.object[key]);
      } else if (PyList_CheckExact(container.object.ptr())) {
        for (const py::handle value : container.object)
          container.items.emplace_back(py::none(), value);
      } else {
        PyObject *key, *value;
        for (Py_ssize_t at = 0; PyDict_Next(container.object.ptr(), &at, &key, &value);)
          container.items.emplace_back(key, value);
      }
      containers_.push_back(std::move(container));
    }
  }

  // The first container that differs, and the position of the item that does; its length where
  // items have come or gone. None where nothing has changed.
  py::object first_change() const {
    HANDLE_TH_ERRORS
    for (size_t i = 0; i < containers_.size(); ++i) {
      if (const auto item = containers_[i].first_change()) return py::make_tuple(i, *item);
    }
    return py::none();
    END_HANDLE_TH_ERRORS_PYBIND
  }

 private:
  struct Item {
    Item(py::handle key, py::handle value)
        : key(py::reinterpret_borrow<py::object>(key)),
          value(py::reinterpret_borrow<py::object>(value)),
          is_tensor(THPVariable_Check(value.ptr())),
          by_value(PyFloat_Check(value.ptr()) || PyLong_Check(value.ptr()) ||
                   PyUnicode_Check(value.ptr()) || PyTuple_Check(value.ptr())),
          requires_grad(is_tensor && THPVariable_Unpack(value.ptr()).requires_grad()),
          memory(is_tensor ? memory_of(value.ptr()) : nullptr) {}

    bool is(PyObject* now) const {
      if (now == value.ptr()) {
        return !is_tensor || (memory_of(now) == memory &&
                              THPVariable_Unpack(now).requires_grad() == requires_grad);
      }
      if (!now || !by_value || Py_TYPE(now) != Py_TYPE(value.ptr())) return false;
      const int equal = PyObject_RichCompareBool(now, value.ptr(), Py_EQ);
      if (equal < 0) throw py::error_already_set();
      return equal;
    }

    py::object key, value;
    bool is_tensor, by_value, requires_grad;
    const void* memory;
  };

  struct Container {
    std::optional<size_t> first_change() const {
      PyObject* const now = object.ptr();
      size_t i = 0;
      if (!whole) {
        for (; i < items.size(); ++i) {
          PyObject* const value = PyDict_GetItemWithError(now, items[i].key.ptr());
          if (!value && PyErr_Occurred()) throw py::error_already_set();
          if (!items[i].is(value)) return i;
        }
        return std::nullopt;
      }
      if (static_cast<size_t>(PyObject_Size(now)) != items.size()) return items.size();
      if (PyList_CheckExact(now)) {
        for (; i < items.size(); ++i) {
          if (!items[i].is(PyList_GET_ITEM(now, static_cast<Py_ssize_t>(i)))) return i;
        }
        return std::nullopt;
      }
      PyObject *key, *value;
      for (Py_ssize_t at = 0; PyDict_Next(now, &at, &key, &value); ++i) {
        if (i == items.size() || key != items[i].key.ptr() || !items[i].is(value)) return i;
      }
      return std::nullopt;
    }

    py::object object;
    bool whole;
    std::vector<Item> items;
  };

  std::vector<Container> containers_;
};

// Gives each parameter the gradient of the same place, where it has another or none.
void set_grads(const py::list& params, const py::list& grads) {
  HANDLE_TH_ERRORS
  const auto at = [](const py::list& list, Py_ssize_t i) -> const at::Tensor& {
    return THPVariable_Unpack(PyList_GET_ITEM(list.ptr(), i));
  };
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params.ptr()); ++i) {
    at::Tensor& grad = at(params, i).mutable_grad();
    if (!grad.is_same(at(grads, i))) grad = at(grads, i);
  }
  END_HANDLE_TH_ERRORS_PYBIND
}

// Each grows with every write that autograd knows of.
int64_t sum_of_versions(const py::list& tensors) {
  int64_t sum = 0;
  for (const py::handle tensor : tensors) {
    const at::Tensor& unpacked = THPVariable_Unpack(tensor.ptr());
    if (!unpacked.is_inference()) sum += unpacked._version();
  }
  return sum;
}

}  // namespace

void bind_graph(py::module_& m) {
  py::class_<Snapshot>(m, "Snapshot")
      .def(py::init<const py::iterable&>())
      .def("first_change", &Snapshot::first_change);
  m.def("set_grads", &set_grads);
  m.def("sum_of_versions", &sum_of_versions);
}

}  // namespace amp_ext
