#include "optim/param_table.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <limits>
#include <sstream>
#include <unordered_map>
#include <utility>

#include "checks/tensors.h"

namespace py = pybind11;

namespace amp_ext {
namespace {

constexpr size_t kNone = std::numeric_limits<size_t>::max();

// Whether an object is a tensor without Python code of its own in the way of `.grad` and of ops.
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

bool is_served(at::ScalarType type) {
  return type == at::kFloat || type == at::kHalf || type == at::kBFloat16;
}

// Why kernels do not serve a tensor. `device` is that of the others.
const char* why_not(const at::Tensor& tensor, at::Device device) {
  if (tensor.unsafeGetTensorImpl()->is_python_dispatch()) return "is a tensor subclass";
  if (tensor.layout() != at::kStrided) return "is not strided";
  if (!is_served(tensor.scalar_type())) return "is not float32, float16 or bfloat16";
  if (tensor.device() != device) return "is on another device than the first parameter";
  return nullptr;
}

const char* why_not_param(const at::Tensor& param, at::Device device) {
  if (const char* why = why_not(param, device)) return why;
  if (!device.is_cpu() && !device.is_cuda()) return "is neither on the CPU nor on a CUDA device";
  return param.is_non_overlapping_and_dense() ? nullptr : "has holes in memory";
}

// Whether kernels can use a tensor of a parameter's state. What is wrong in other ways is refused
// by the checks of the op.
bool is_usable(state::Name name, const at::Tensor& tensor, const at::Tensor& param) {
  if (name == state::step)
    return tensor.scalar_type() == at::kFloat && tensor.numel() == 1 &&
           tensor.device() == param.device();
  return tensor.sizes() != param.sizes() || same_order(tensor, param);
}

void prefetch_object(PyObject* object) { __builtin_prefetch(object); }

}  // namespace

ParamTable::ParamTable() {
  for (size_t i = 0; i < kStateNames.size(); ++i) {
    names_[i] = py::reinterpret_steal<py::object>(PyUnicode_InternFromString(kStateNames[i]));
    other_names_[i] = names_[i];
  }
}

std::optional<std::string> ParamTable::read(py::handle param_groups) {
  groups_.clear();
  params_.clear();
  param_of_row_.clear();
  rows_.clear();
  size_t index = 0;
  for (const py::handle group : param_groups) {
    if (auto why = read_group(group, index++)) return why;
  }
  return std::nullopt;
}

// From a parameter to its gradient's memory leads a chain of pointers, each a cache miss; every
// loop prefetches some parameters ahead, so that the misses of different parameters overlap.
std::optional<std::string> ParamTable::read_group(py::handle group, size_t index) {
  PyObject* const sequence =
      PySequence_Fast(py::object(group[py::str("params")]).ptr(), "params must be iterable");
  if (!sequence) throw py::error_already_set();
  Group& read = groups_.emplace_back(
      Group{py::reinterpret_steal<py::object>(sequence), params_.size(), 0, rows_.size(), 0});
  PyObject** const objects = PySequence_Fast_ITEMS(sequence);
  const auto n = static_cast<size_t>(PySequence_Fast_GET_SIZE(sequence));
  read.params_count = n;
  params_.insert(params_.end(), objects, objects + n);

  const auto refused = [&](size_t i, const char* what, const char* why) {
    std::ostringstream out;
    out << what << "param_groups[" << index << "]['params'][" << i << "] " << why;
    return out.str();
  };
  rows_.reserve(rows_.size() + n);
  param_of_row_.reserve(rows_.size() + n);
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) prefetch_object(objects[i + kAhead]);
    if (!is_plain(objects[i])) return refused(i, "", "is a tensor subclass");
    const at::Tensor& param = THPVariable_Unpack(objects[i]);
    prefetch_tensor(param.unsafeGetTensorImpl());
    rows_.push_back({&param, nullptr, {}});
  }
  size_t kept = read.first_row;
  const size_t end = rows_.size();
  for (size_t row = kept; row < end; ++row) {
    if (row + kAhead < end)
      __builtin_prefetch(rows_[row + kAhead].param->unsafeGetTensorImpl()->autograd_meta());
    const at::Tensor& grad = rows_[row].param->unsafeGetTensorImpl()->grad();
    if (!grad.defined()) continue;
    prefetch_tensor(grad.unsafeGetTensorImpl());
    rows_[kept++] = {rows_[row].param, &grad, {}};
    param_of_row_.push_back(read.first_param + row - read.first_row);
  }
  rows_.resize(kept);
  read.rows = kept - read.first_row;
  for (size_t row = read.first_row; row < kept; ++row) {
    const auto& [param, grad, state] = rows_[row];
    const at::Device device = rows_.front().param->device();
    const size_t i = param_of_row_[row] - read.first_param;
    if (const char* why = why_not_param(*param, device)) return refused(i, "", why);
    if (const char* why = why_not(*grad, device)) return refused(i, "the gradient of ", why);
  }
  return std::nullopt;
}

// Sets dicts_. False if a parameter is there twice.
bool ParamTable::find_dicts(PyObject* state) {
  dicts_.assign(params_.size(), nullptr);
  std::unordered_map<PyObject*, size_t> params;  // built when an entry is not where it was
  const auto find = [&](PyObject* key) {
    if (params.empty()) {
      for (size_t i = 0; i < params_.size(); ++i) params.emplace(params_[i], i);
    }
    const auto found = params.find(key);
    return found == params.end() ? kNone : found->second;
  };
  PyObject *key, *value;
  Py_ssize_t position = 0;
  param_of_entry_.resize(PyDict_Size(state), kNone);
  for (size_t entry = 0; PyDict_Next(state, &position, &key, &value); ++entry) {
    size_t& i = param_of_entry_[entry];
    if (i >= params_.size() || params_[i] != key) i = find(key);
    if (i != kNone) dicts_[i] = value;
  }
  return params.empty() || params.size() == params_.size();
}

std::optional<state::Name> ParamTable::name_of(PyObject* key) {
  for (size_t i = 0; i < names_.size(); ++i) {
    if (key == names_[i].ptr() || key == other_names_[i].ptr()) return state::Name(i);
  }
  if (!PyUnicode_Check(key)) return std::nullopt;
  for (size_t i = 0; i < names_.size(); ++i) {
    if (PyUnicode_Compare(key, names_[i].ptr()) != 0) continue;
    other_names_[i] = py::reinterpret_borrow<py::object>(key);
    return state::Name(i);
  }
  return std::nullopt;
}

ParamTable::StateObjects ParamTable::objects_of(PyObject* dict) {
  StateObjects objects{};
  PyObject *key, *value;
  Py_ssize_t position = 0;
  while (PyDict_Next(dict, &position, &key, &value)) {
    if (const auto name = name_of(key)) objects[*name] = value;
  }
  return objects;
}

std::vector<py::list> ParamTable::read_state(py::handle state,
                                             const std::vector<std::vector<std::string>>& needed) {
  TORCH_CHECK_TYPE(PyDict_Check(state.ptr()), "an optimizer's state must be a dict, got ",
                   Py_TYPE(state.ptr())->tp_name);
  TORCH_INTERNAL_ASSERT(needed.size() == groups_.size());
  TORCH_CHECK_VALUE(find_dicts(state.ptr()),
                    "a parameter is more than once in an optimizer's param_groups");
  const size_t n = rows_.size();
  std::vector<StateObjects> objects(n);
  written_.resize(n);
  const auto dict_of = [&](size_t row) {
    PyObject* const dict = dicts_[param_of_row_[row]];
    return dict && PyDict_Check(dict) ? dict : nullptr;
  };
  for (size_t i = 0; i < n; ++i) {
    if (i + 2 * kAhead < n) __builtin_prefetch(dicts_[param_of_row_[i + 2 * kAhead]]);
    if (i + kAhead < n) {
      if (PyObject* const ahead = dict_of(i + kAhead)) {
        const void* const keys = reinterpret_cast<PyDictObject*>(ahead)->ma_keys;
        __builtin_prefetch(keys);
        __builtin_prefetch(static_cast<const char*>(keys) + 64);
      }
    }
    if (PyObject* const dict = dict_of(i)) objects[i] = objects_of(dict);
  }

  std::vector<py::list> missing(groups_.size());
  for (size_t group = 0; group < groups_.size(); ++group) {
    std::vector<state::Name> names;
    for (const std::string& name : needed[group]) {
      const auto found = std::find(kStateNames.begin(), kStateNames.end(), name);
      TORCH_INTERNAL_ASSERT(found != kStateNames.end());
      names.push_back(state::Name(found - kStateNames.begin()));
    }
    const size_t end = groups_[group].first_row + groups_[group].rows;
    for (size_t i = groups_[group].first_row; i < end; ++i) {
      for (const state::Name name : names) {
        if (i + 2 * kAhead < end) prefetch_object(objects[i + 2 * kAhead][name]);
        if (i + kAhead < end) {
          PyObject* const ahead = objects[i + kAhead][name];
          if (ahead && THPVariable_CheckExact(ahead))
            prefetch_tensor(THPVariable_Unpack(ahead).unsafeGetTensorImpl());
        }
      }
      ParamRow& row = rows_[i];
      bool complete = true;
      for (const state::Name name : names) {
        if (name == state::master_param) {
          if (row.param->scalar_type() == at::kFloat) continue;
          const Written now = Written::of(*row.param);
          complete &= std::exchange(written_[i], now) == now;
        }
        PyObject* const object = objects[i][name];
        const bool found = object && is_plain(object);
        if (found) row.state[name] = &THPVariable_Unpack(object);
        complete &= found && is_usable(name, *row.state[name], *row.param);
      }
      if (!complete) missing[group].append(py::handle(params_[param_of_row_[i]]));
    }
  }
  return missing;
}

ParamTable::Written ParamTable::Written::of(const at::Tensor& param) {
  return {param.unsafeGetTensorImpl(), param.const_data_ptr(),
          param.is_inference() ? 0 : static_cast<int64_t>(param._version())};
}

void ParamTable::note_written() {
  for (size_t i = 0; i < rows_.size(); ++i) {
    if (rows_[i].state[state::master_param]) written_[i] = Written::of(*rows_[i].param);
  }
}

}  // namespace amp_ext
