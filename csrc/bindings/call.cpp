// Calls of ops from Python. torch's own parser of arguments takes longer than a small op: this one
// knows the types of our schemas, and leaves to torch's what is out of the ordinary.
#include "call.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <string>
#include <vector>

namespace py = pybind11;

namespace amp_ext {
namespace {

std::optional<c10::IValue> tensor_in(PyObject* object) {
  if (!THPVariable_CheckExact(object)) return std::nullopt;
  return THPVariable_Unpack(object);
}

std::optional<c10::IValue> tensors_in(PyObject* object) {
  if (!PyList_CheckExact(object) && !PyTuple_CheckExact(object)) return std::nullopt;
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(object);
  PyObject** const items = PySequence_Fast_ITEMS(object);
  c10::List<at::Tensor> list;
  list.reserve(size);
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (!THPVariable_CheckExact(items[i])) return std::nullopt;
    list.push_back(THPVariable_Unpack(items[i]));
  }
  return list;
}

std::optional<c10::IValue> float_in(PyObject* object) {
  if (!PyFloat_CheckExact(object)) return std::nullopt;
  return PyFloat_AS_DOUBLE(object);
}

std::optional<c10::IValue> int_in(PyObject* object) {
  int overflow = 0;
  if (!PyLong_CheckExact(object)) return std::nullopt;
  const int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow ? std::nullopt : std::optional<c10::IValue>(value);
}

std::optional<c10::IValue> bool_in(PyObject* object) {
  if (!PyBool_Check(object)) return std::nullopt;
  return object == Py_True;
}

std::optional<c10::IValue> string_in(PyObject* object) {
  Py_ssize_t size = 0;
  const char* const text =
      PyUnicode_CheckExact(object) ? PyUnicode_AsUTF8AndSize(object, &size) : nullptr;
  if (!text) return PyErr_Clear(), std::nullopt;
  return std::string(text, size);
}

std::optional<c10::IValue> dtype_in(PyObject* object) {
  if (!THPDtype_Check(object)) return std::nullopt;
  return static_cast<int64_t>(reinterpret_cast<THPDtype*>(object)->scalar_type);
}

// The value of a Python object; none if it is not of the type, or is to be looked at by torch.
using Convert = std::optional<c10::IValue> (*)(PyObject*);

// By the types of our schemas, as they are written.
Convert converter_of(const std::string& type) {
  if (type == "Tensor") return tensor_in;
  if (type == "Tensor[]") return tensors_in;
  if (type == "float") return float_in;
  if (type == "int") return int_in;
  if (type == "bool") return bool_in;
  if (type == "str") return string_in;
  if (type == "ScalarType") return dtype_in;
  TORCH_CHECK(false, "amp_ext: no argument of an op is of type ", type);
}

struct Argument {
  explicit Argument(const c10::Argument& argument)
      : name(
            py::reinterpret_steal<py::object>(PyUnicode_InternFromString(argument.name().c_str()))),
        default_value(argument.default_value()),
        by_name_alone(argument.kwarg_only()) {
    std::string type = argument.real_type()->str();
    if (argument.real_type()->kind() == c10::TypeKind::OptionalType) {
      is_optional = true;
      type = argument.real_type()->castRaw<c10::OptionalType>()->getElementType()->str();
    }
    convert = converter_of(type);
  }

  std::optional<c10::IValue> from(PyObject* object) const {
    return object == Py_None && is_optional ? std::optional(c10::IValue()) : convert(object);
  }

  py::object name;
  std::optional<c10::IValue> default_value;
  bool by_name_alone;
  bool is_optional = false;
  Convert convert;
};

// Faster than pybind11's, which looks up what it keeps of the thread.
class NoGil {
 public:
  NoGil() : thread_(PyEval_SaveThread()) {}
  ~NoGil() { PyEval_RestoreThread(thread_); }
  NoGil(const NoGil&) = delete;
  NoGil& operator=(const NoGil&) = delete;

 private:
  PyThreadState* thread_;
};

class Caller {
 public:
  Caller(const std::string& name, py::object torchs)
      : op_(c10::Dispatcher::singleton().findSchemaOrThrow(("amp_ext::" + name).c_str(), "")),
        torchs_(std::move(torchs)) {
    for (const c10::Argument& argument : op_.schema().arguments())
      arguments_.emplace_back(argument);
  }

  PyObject* call(PyObject* const* args, Py_ssize_t count, PyObject* names) const {
    torch::jit::Stack stack;
    // Its errors are Python's already.
    if (!parse(args, count, names, stack))
      return PyObject_Vectorcall(torchs_.ptr(), args, count, names);
    HANDLE_TH_ERRORS
    // A tensor that nothing but Python holds takes the GIL when it is let go.
    const c10::SmallVector<c10::IValue, 8> held(stack.begin(), stack.end());
    {
      const NoGil no_gil;
      op_.callBoxed(stack);
    }
    return results(stack);
    END_HANDLE_TH_ERRORS
  }

 private:
  // False for what torch would refuse, or hand to somebody else.
  bool parse(PyObject* const* args, Py_ssize_t count, PyObject* names,
             torch::jit::Stack& stack) const {
    const size_t size = arguments_.size(), named = names ? PyTuple_GET_SIZE(names) : 0;
    if (at::impl::torch_function_mode_enabled() || count + named > size ||
        c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Tracer))
      return false;
    stack.reserve(size);
    size_t used = 0;
    for (size_t i = 0; i < size; ++i) {
      const Argument& argument = arguments_[i];
      PyObject* given = nullptr;
      if (i < static_cast<size_t>(count)) {
        if (argument.by_name_alone) return false;
        given = args[i];
      } else {
        for (size_t j = 0; j < named && !given; ++j) {
          if (PyTuple_GET_ITEM(names, j) == argument.name.ptr()) given = args[count + j];
        }
        used += given != nullptr;
      }
      auto value = given ? argument.from(given) : argument.default_value;
      if (!value) return false;
      stack.push_back(std::move(*value));
    }
    return used == named;
  }

  static PyObject* results(const torch::jit::Stack& stack) {
    if (stack.empty()) Py_RETURN_NONE;
    if (stack.size() == 1) return THPVariable_Wrap(stack[0].toTensor());
    py::tuple all(stack.size());
    for (size_t i = 0; i < stack.size(); ++i)
      all[i] = py::reinterpret_steal<py::object>(THPVariable_Wrap(stack[i].toTensor()));
    return all.release().ptr();
  }

  c10::OperatorHandle op_;
  py::object torchs_;
  std::vector<Argument> arguments_;
};

constexpr const char* kCapsule = "amp_ext.Caller";

PyObject* call(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  const auto* const caller = static_cast<const Caller*>(PyCapsule_GetPointer(self, kCapsule));
  return caller->call(args, count, names);
}

// Lives as long as the process, as the op does.
py::object op_caller(const std::string& name, py::object torchs) {
  static PyMethodDef method{"op", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call)),
                            METH_FASTCALL | METH_KEYWORDS, nullptr};
  auto caller = std::make_unique<Caller>(name, std::move(torchs));
  const auto self =
      py::reinterpret_steal<py::object>(PyCapsule_New(caller.get(), kCapsule, nullptr));
  caller.release();
  return py::reinterpret_steal<py::object>(PyCFunction_New(&method, self.ptr()));
}

}  // namespace

void bind_call(py::module_& m) {
  m.def("op_caller", &op_caller, py::arg("name"), py::arg("torchs"),
        "The function of an op, which hands a call that is out of the ordinary to torch's own.");
}

}  // namespace amp_ext
