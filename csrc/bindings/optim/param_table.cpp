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
#include "optim/local_row.h"
#include "optim/served.h"

namespace py = pybind11;

namespace amp_ext {
namespace {

constexpr size_t kNone = std::numeric_limits<size_t>::max();

// Whether kernels can use a tensor of a parameter's state. What is wrong in other ways is refused
// by the checks of the op.
bool is_usable(state::Name name, const at::Tensor& tensor, const at::Tensor& param) {
  if (name == state::step)
    return tensor.scalar_type() == at::kFloat && tensor.numel() == 1 &&
           tensor.device() == param.device();
  return (tensor.is_contiguous() && param.is_contiguous()) || tensor.sizes() != param.sizes() ||
         same_order(tensor, param);
}

bool is_usable(const ParamRow& row) {
  for (size_t name = 0; name < row.state.size(); ++name) {
    const at::Tensor* const tensor = row.state[name];
    if (tensor && !is_usable(state::Name(name), *tensor, *row.param)) return false;
  }
  return true;
}

// The value of a key, or null. Both are borrowed.
PyObject* entry_of(PyObject* dict, PyObject* key) {
  PyObject* const value = PyDict_GetItemWithError(dict, key);
  if (!value && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

}  // namespace

state::Name state_name(const std::string& name) {
  const auto found = std::find(kStateNames.begin(), kStateNames.end(), name);
  TORCH_CHECK_VALUE(found != kStateNames.end(), "amp_ext: states have no ", name);
  return state::Name(found - kStateNames.begin());
}

// Ops on a DTensor count in its own version alone, those on its local tensor in that one's.
ParamTable::Written::Written(const ParamRow& row) : param(*row.param) {
  if (row.dtensor) dtensor.emplace(*row.dtensor);
}

bool ParamTable::Written::is(const ParamRow& now) const {
  return param.is(*now.param) && (now.dtensor ? dtensor && dtensor->is(*now.dtensor) : !dtensor);
}

ParamTable::ParamTable() {
  for (size_t i = 0; i < kStateNames.size(); ++i) {
    names_[i] = py::reinterpret_steal<py::object>(PyUnicode_InternFromString(kStateNames[i]));
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
  rows_.reserve(params_.size());  // they do not move while they are read
  written_.resize(params_.size());
  if (state) find_states(state.ptr());
}

void ParamTable::find_states(PyObject* state) {
  TORCH_CHECK_TYPE(PyDict_Check(state), "an optimizer's state must be a dict, got ",
                   Py_TYPE(state)->tp_name);
  dicts_.assign(params_.size(), nullptr);
  std::unordered_map<PyObject*, size_t> indices;  // made when an entry is not where it was
  const auto find = [&](PyObject* key) {
    if (indices.empty()) {
      for (size_t i = 0; i < params_.size(); ++i) indices.emplace(params_[i], i);
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

// Nearly always a state begins with what is needed, in this order, by the interned names.
void ParamTable::find_objects(PyObject* dict, const std::vector<state::Name>& needed,
                              StateObjects& objects) const {
  size_t k = 0;
  PyObject *key, *value;
  for (Py_ssize_t position = 0; k < needed.size() && dict; ++k) {
    if (!PyDict_Next(dict, &position, &key, &value) || key != names_[needed[k]].ptr()) break;
    objects[k] = value;
  }
  for (; k < needed.size(); ++k)
    objects[k] = dict ? entry_of(dict, names_[needed[k]].ptr()) : nullptr;
}

bool ParamTable::find_state(ParamRow& row, const StateObjects& objects,
                            const std::vector<state::Name>& needed, bool renewed) {
  bool found = true;
  for (size_t i = 0; i < needed.size(); ++i) {
    const state::Name name = needed[i];
    if (name == state::master_param || name == state::autocast_copy) {
      const bool is_fp32 = row.param->scalar_type() == at::kFloat;
      if (is_fp32 == (name == state::master_param)) continue;
      const std::optional<Written>& written = written_[row.index];
      found &= renewed || (written && written->is(row));
    }
    if (objects[i] && is_plain(objects[i])) {
      row.state[name] = &THPVariable_Unpack(objects[i]);
    } else {
      found = false;
    }
  }
  return found;
}

std::optional<std::string> ParamTable::read(size_t group, const std::vector<state::Name>& needed,
                                            bool renewed, py::list& missing, Visit visit) {
  TORCH_INTERNAL_ASSERT(needed.size() <= kStateNames.size());
  const auto& [sequence, first, count] = groups_[group];
  TORCH_INTERNAL_ASSERT(rows_.capacity() - rows_.size() >= count);
  PyObject* const* const params = params_.data() + first;
  PyObject* const* const dicts = needed.empty() ? nullptr : dicts_.data() + first;
  const auto refused = [&](size_t i, const char* what, const char* why) {
    std::ostringstream out;
    out << what << "param_groups[" << group << "]['params'][" << i << "] " << why;
    return out.str();
  };
  bool is_complete = true;
  for (size_t i = 0; i < count; ++i) {
    PyObject* const held = held_of(params[i]);
    if (!held) return refused(i, "", "is a tensor subclass");
    const at::Tensor& grad = THPVariable_Unpack(params[i]).unsafeGetTensorImpl()->grad();
    if (!grad.defined()) continue;
    ParamRow& row = rows_.emplace_back(first + i, &THPVariable_Unpack(held), &grad);
    StateObjects objects{};
    if (dicts) find_objects(dicts[i], needed, objects);
    bool found = true;
    if (held != params[i]) {
      if (const char* why = localize(params[i], needed, row, objects, found))
        return refused(i, "", why);
    }
    found &= find_state(row, objects, needed, renewed);
    if (found && is_complete && visit(row, Rows::plain)) continue;
    if (const char* why = why_not_param(*row.param, device())) return refused(i, "", why);
    if (const char* why = why_not_grad(*row.grad, device()))
      return refused(i, "the gradient of ", why);
    if (!found || !is_usable(row)) {
      is_complete = false;
      missing.append(py::handle(params[i]));
    } else if (is_complete) {
      visit(row, Rows::any);
    }
  }
  return std::nullopt;
}

std::optional<std::string> ParamTable::why_not_together(size_t group) const {
  const auto& [sequence, first, count] = groups_[group];
  const auto begin = std::ranges::lower_bound(rows_, first, {}, &ParamRow::index);
  const auto end = std::ranges::lower_bound(rows_, first + count, {}, &ParamRow::index);
  std::vector<MemoryRange> ranges;
  ranges.reserve(end - begin);
  for (auto row = begin; row != end; ++row)
    ranges.emplace_back(row->param->const_data_ptr(), row->param->nbytes());
  const auto shared = find_overlap(ranges);
  if (!shared) return std::nullopt;
  std::ostringstream out;
  out << "param_groups[" << group << "]['params'][" << begin[shared->first].index - first
      << "] shares memory with [" << begin[shared->second].index - first << "]";
  return out.str();
}

std::vector<py::object> ParamTable::params() const {
  std::vector<py::object> result;
  for (PyObject* const param : params_) result.push_back(py::reinterpret_borrow<py::object>(param));
  return result;
}

void ParamTable::finish_step() {
  std::vector<at::Tensor> weights, copies;
  for (const ParamRow& row : rows_) {
    mark_written(row.param->unsafeGetTensorImpl());
    if (row.dtensor) mark_written(row.dtensor->unsafeGetTensorImpl());
    if (const at::Tensor* const copy = row.state[state::autocast_copy]) {
      mark_written(copy->unsafeGetTensorImpl());
      if (copy->is_inference()) continue;
      weights.push_back(*row.param);
      copies.push_back(*copy);
    }
  }
  // Only now, since parameters may share a version.
  for (const ParamRow& row : rows_) {
    if (row.state[state::autocast_copy] || row.state[state::master_param])
      written_[row.index].emplace(row);
  }
  if (!copies.empty()) provide_copies(weights, copies);
}

void ParamTable::close() { groups_.clear(); }

}  // namespace amp_ext
