#include "optim/param_table.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <limits>
#include <sstream>
#include <unordered_map>
#include <utility>

#include "autocast/provided_copies.h"
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
  return (tensor.is_contiguous() && param.is_contiguous()) || tensor.sizes() != param.sizes() ||
         same_order(tensor, param);
}

// Some parameters whose tensors fit into the nearest cache.
constexpr size_t kBlock = 16;

template <class Object>
void prefetch_all(const Object* object) {
  constexpr size_t kLine = 64;
  const auto* const begin = reinterpret_cast<const char*>(object);
  for (size_t at = 0; at < sizeof(Object); at += kLine) __builtin_prefetch(begin + at);
  __builtin_prefetch(begin + sizeof(Object) - 1);
}

void prefetch_storage(const at::TensorImpl* tensor) {
  if (tensor->has_storage()) prefetch_ends(tensor->unsafe_storage().unsafeGetStorageImpl());
}

void prefetch_keys(PyObject* dict) {
  const void* const keys = reinterpret_cast<PyDictObject*>(dict)->ma_keys;
  __builtin_prefetch(keys);
  __builtin_prefetch(static_cast<const char*>(keys) + 64);
}

}  // namespace

state::Name state_name(const std::string& name) {
  const auto found = std::find(kStateNames.begin(), kStateNames.end(), name);
  TORCH_CHECK_VALUE(found != kStateNames.end(), "amp_ext: states have no ", name);
  return state::Name(found - kStateNames.begin());
}

ParamTable::ParamTable() {
  for (size_t i = 0; i < kStateNames.size(); ++i) {
    names_[i] = py::reinterpret_steal<py::object>(PyUnicode_InternFromString(kStateNames[i]));
    other_names_[i] = names_[i];
  }
}

void ParamTable::open(py::handle param_groups, py::handle state) {
  close();
  params_.clear();
  rows_.clear();
  for (const py::handle group : param_groups) {
    const py::object params = group[py::str("params")];
    auto sequence =
        py::reinterpret_steal<py::object>(PySequence_Fast(params.ptr(), "params must be iterable"));
    if (!sequence) throw py::error_already_set();
    PyObject** const objects = PySequence_Fast_ITEMS(sequence.ptr());
    const auto n = static_cast<size_t>(PySequence_Fast_GET_SIZE(sequence.ptr()));
    groups_.push_back({std::move(sequence), params_.size(), n});
    params_.insert(params_.end(), objects, objects + n);
  }
  rows_.reserve(params_.size());
  written_.resize(params_.size());
  if (state) find_states(state.ptr());
}

void ParamTable::find_states(PyObject* state) {
  TORCH_CHECK_TYPE(PyDict_Check(state), "an optimizer's state must be a dict, got ",
                   Py_TYPE(state)->tp_name);
  dicts_.assign(params_.size(), nullptr);
  std::unordered_map<PyObject*, size_t> indices;  // made when an entry is not where it was
  const auto find = [&](PyObject* key) {
    for (size_t i = 0; indices.size() < params_.size(); ++i) {
      TORCH_CHECK_VALUE(indices.emplace(params_[i], i).second,
                        "a parameter is more than once in an optimizer's param_groups");
    }
    const auto found = indices.find(key);
    return found == indices.end() ? kNone : found->second;
  };
  PyObject *key, *value;
  Py_ssize_t position = 0;
  param_of_entry_.resize(PyDict_Size(state), kNone);
  for (size_t entry = 0; PyDict_Next(state, &position, &key, &value); ++entry) {
    size_t& i = param_of_entry_[entry];
    if (i >= params_.size() || params_[i] != key) i = find(key);
    if (i != kNone && PyDict_Check(value)) dicts_[i] = value;
  }
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

bool ParamTable::complete(ParamRow& row, const StateObjects& objects,
                          const std::vector<state::Name>& needed, bool renewed) {
  bool complete = true;
  for (const state::Name name : needed) {
    if (name == state::master_param || name == state::autocast_copy) {
      const bool is_fp32 = row.param->scalar_type() == at::kFloat;
      if (is_fp32 == (name == state::master_param)) continue;
      const std::optional<Seen>& written = written_[row.index];
      complete &= renewed || (written && written->is(*row.param));
    }
    PyObject* const object = objects[name];
    const bool found = object && is_plain(object);
    if (found) row.state[name] = &THPVariable_Unpack(object);
    complete &= found && is_usable(name, *row.state[name], *row.param);
  }
  return complete;
}

// From a parameter to its gradient's and its state's memory lead chains of pointers, each a cache
// miss. Each loop follows one pointer of all chains of a block and prefetches what is behind, so
// that the misses of a block overlap.
std::optional<std::string> ParamTable::read(size_t group, const std::vector<state::Name>& needed,
                                            bool renewed, py::list& missing,
                                            c10::function_ref<void(Rows)> visit) {
  const auto& [sequence, first, count] = groups_[group];
  const auto refused = [&, first = first](size_t i, const char* what, const char* why) {
    std::ostringstream out;
    out << what << "param_groups[" << group << "]['params'][" << i - first << "] " << why;
    return out.str();
  };
  for (size_t begin = first; begin < first + count; begin += kBlock) {
    const size_t end = std::min(begin + kBlock, first + count);
    for (size_t i = begin; i < end; ++i) {
      if (i + kBlock < first + count) __builtin_prefetch(params_[i + kBlock]);
      if (!is_plain(params_[i])) return refused(i, "", "is a tensor subclass");
      prefetch_all(THPVariable_Unpack(params_[i]).unsafeGetTensorImpl());
      if (!needed.empty()) __builtin_prefetch(dicts_[i]);
    }
    for (size_t i = begin; i < end; ++i) {
      const at::TensorImpl* const param = THPVariable_Unpack(params_[i]).unsafeGetTensorImpl();
      __builtin_prefetch(const_cast<at::TensorImpl*>(param)->autograd_meta());
      prefetch_storage(param);
      if (!needed.empty() && dicts_[i]) prefetch_keys(dicts_[i]);
    }

    std::array<StateObjects, kBlock> objects;
    const size_t first_row = rows_.size();
    for (size_t i = begin; i < end; ++i) {
      const at::Tensor& param = THPVariable_Unpack(params_[i]);
      const at::Tensor& grad = param.unsafeGetTensorImpl()->grad();
      if (!grad.defined()) continue;
      prefetch_all(grad.unsafeGetTensorImpl());
      const size_t row = rows_.size() - first_row;
      rows_.push_back({i, &param, &grad, {}});
      if (needed.empty()) continue;
      objects[row] = dicts_[i] ? objects_of(dicts_[i]) : StateObjects{};
      for (const state::Name name : needed) __builtin_prefetch(objects[row][name]);
    }
    const size_t n = rows_.size() - first_row;
    for (size_t k = 0; k < n; ++k) {
      prefetch_storage(rows_[first_row + k].grad->unsafeGetTensorImpl());
      for (const state::Name name : needed) {
        PyObject* const object = objects[k][name];
        if (object && THPVariable_CheckExact(object))
          prefetch_all(THPVariable_Unpack(object).unsafeGetTensorImpl());
      }
    }
    const at::Device device = n == 0 ? at::Device(at::kCPU) : rows_.front().param->device();
    bool all_complete = true;
    for (size_t k = 0; k < n; ++k) {
      ParamRow& row = rows_[first_row + k];
      if (const char* why = why_not_param(*row.param, device)) return refused(row.index, "", why);
      if (const char* why = why_not(*row.grad, device))
        return refused(row.index, "the gradient of ", why);
      if (!complete(row, objects[k], needed, renewed)) {
        all_complete = false;
        missing.append(py::handle(params_[row.index]));
      }
      for (const at::Tensor* const tensor : row.state) {
        if (tensor) prefetch_storage(tensor->unsafeGetTensorImpl());
      }
    }
    if (all_complete) visit(rows().slice(first_row));
  }
  return std::nullopt;
}

std::vector<py::object> ParamTable::params() const {
  std::vector<py::object> result;
  for (PyObject* const param : params_) result.push_back(py::reinterpret_borrow<py::object>(param));
  return result;
}

void ParamTable::finish_step() {
  const size_t n = rows_.size();
  std::vector<at::Tensor> weights, copies;
  for (size_t i = 0; i < n; ++i) {
    if (i + 2 * kAhead < n)
      __builtin_prefetch(&rows_[i + 2 * kAhead].param->unsafeGetTensorImpl()->version_counter());
    if (i + kAhead < n) prefetch_version(rows_[i + kAhead].param->unsafeGetTensorImpl());
    mark_written(rows_[i].param->unsafeGetTensorImpl());
    if (const at::Tensor* const copy = rows_[i].state[state::autocast_copy]) {
      mark_written(copy->unsafeGetTensorImpl());
      if (copy->is_inference()) continue;
      weights.push_back(*rows_[i].param);
      copies.push_back(*copy);
    }
  }
  // Only now, since parameters may share a version.
  for (const ParamRow& row : rows_) {
    if (row.state[state::autocast_copy] || row.state[state::master_param])
      written_[row.index].emplace(*row.param);
  }
  if (!copies.empty()) provide_copies(weights, copies);
}

void ParamTable::close() { groups_.clear(); }

}  // namespace amp_ext
