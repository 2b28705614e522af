#include "optim/param_table.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <ranges>
#include <sstream>
#include <utility>

#include "checks/dtensor.h"
#include "checks/tensors.h"
#include "params/plain.h"

namespace py = pybind11;

namespace amp_ext {
namespace {

// Returns whether kernels can use the tensors of a parameter's state. The checks of the op refuse
// other faults.
bool is_usable(const ParamRow& row) {
  const at::Tensor& param = *row.param;
  const auto is_ordered = [&](const at::Tensor& tensor) {
    return (tensor.is_contiguous() && param.is_contiguous()) || tensor.sizes() != param.sizes() ||
           same_order(tensor, param);
  };
  for (const Role role : {kParam, kExpAvg, kExpAvgSq, kMaxExpAvgSq}) {
    const at::Tensor* const tensor = row.tensors[role];
    if (tensor && !is_ordered(*tensor)) return false;
  }
  const at::Tensor& master = *row.tensors[kParam];
  if (row.tensors[kCopy] && (master.scalar_type() != at::kFloat ||
                             master.sizes() != param.sizes() || master.device() != param.device()))
    return false;
  const at::Tensor* const step = row.tensors[kStep];
  return !step || (step->scalar_type() == at::kFloat && step->numel() == 1 &&
                   step->device() == param.device());
}

// Finds keys in a dict, without hashing those that come in the order of the entries. Others, such
// as frozen parameters without a state, may come between.
class OrderedReader {
 public:
  explicit OrderedReader(PyObject* dict) : dict_(dict) {}

  // Returns the value of a key, borrowed, or null.
  PyObject* find(PyObject* key) {
    if (!next_) PyDict_Next(dict_, &position_, &next_, &value_);
    if (next_ == key) {
      next_ = nullptr;
      return value_;
    }
    PyObject* const value = PyDict_GetItemWithError(dict_, key);
    if (!value && PyErr_Occurred()) throw py::error_already_set();
    return value;
  }

 private:
  PyObject* dict_;
  Py_ssize_t position_ = 0;
  PyObject *next_ = nullptr, *value_ = nullptr;  // of an entry that no key has found yet
};

PyObject* local_state(PyObject* object, const Sharding& sharding) {
  if (!object || !is_dtensor(object) || !(sharding_of(object) == sharding)) return nullptr;
  return local_of(object);
}

// Replaces the gradient and the states of a DTensor's row by their local tensors, a state that is
// not sharded as the parameter by null. Returns why kernels do not serve the row, or null. Sets
// `is_placed` to false where the gradient must be redistributed before the row is made.
const char* localize(PyObject* param, const std::vector<State>& needed, ParamRow& row,
                     StateObjects& objects, bool& is_placed) {
  const Sharding sharding = sharding_of(param);
  if (sharding.has_partial()) return "is a DTensor that is a sum over processes (Partial)";
  const py::object grad = py::handle(param).attr("grad");
  const char* const other_grad = "is a DTensor whose gradient is not a DTensor on the same mesh";
  if (!is_dtensor(grad.ptr())) return other_grad;
  const Sharding of_grad = sharding_of(grad.ptr());
  is_placed = of_grad == sharding;
  if (!is_placed && !of_grad.mesh.equal(sharding.mesh)) return other_grad;
  row.dtensor = &THPVariable_Unpack(param);
  row.tensors[kGrad] = &THPVariable_Unpack(local_of(grad.ptr()));
  for (size_t i = 0; i < needed.size(); ++i) {
    if (needed[i].role != kStep) objects[i] = local_state(objects[i], sharding);
  }
  return nullptr;
}

}  // namespace

std::vector<State> states_of(const std::vector<py::str>& names) {
  static constexpr std::array<std::pair<const char*, Role>, 6> kRolesOf{
      {{"step", kStep},
       {"exp_avg", kExpAvg},
       {"momentum_buffer", kExpAvg},
       {"exp_avg_sq", kExpAvgSq},
       {"max_exp_avg_sq", kMaxExpAvgSq},
       {"master_param", kParam}}};
  std::vector<State> states;
  for (const py::str& name : names) {
    const auto role = std::ranges::find(kRolesOf, std::string(name),
                                        [](const auto& each) { return std::string(each.first); });
    TORCH_CHECK_VALUE(role != kRolesOf.end(), "amp_ext: states have no ", std::string(name));
    states.push_back({name, role->second});
  }
  return states;
}

ParamTable::ParamTable(py::handle param_groups, py::handle state)
    : params_(param_groups), rows_(params_.groups()) {
  if (state) find_states(state.ptr());
}

void ParamTable::find_states(PyObject* state) {
  TORCH_CHECK_TYPE(PyDict_Check(state), "an optimizer's state must be a dict, got ",
                   Py_TYPE(state)->tp_name);
  OrderedReader states(state);
  for (PyObject* const param : params_.all()) {
    PyObject* const entry = states.find(param);
    dicts_.push_back(entry && PyDict_Check(entry) ? entry : nullptr);
  }
}

// Returns whether all needed states are there.
bool ParamTable::find_state(ParamRow& row, const StateObjects& objects,
                            const std::vector<State>& needed) {
  bool found = true;
  for (size_t i = 0; i < needed.size(); ++i) {
    const Role role = needed[i].role;
    if (role == kParam && row.param->scalar_type() == at::kFloat) continue;
    if (!objects[i] || !is_plain(objects[i])) {
      found = false;
      continue;
    }
    row.tensors[role] = &THPVariable_Unpack(objects[i]);
    if (role == kParam) row.tensors[kCopy] = row.param;
  }
  return found;
}

std::optional<std::string> ParamTable::read(size_t group, const std::vector<State>& needed,
                                            py::list& missing,
                                            c10::function_ref<bool(const ParamRow&)> add_plain,
                                            c10::function_ref<void(const ParamRow&)> add) {
  TORCH_INTERNAL_ASSERT(needed.size() <= kRoles);
  const size_t first = params_.first(group), count = params_.size(group);
  PyObject* const* const params = params_.all().data() + first;
  PyObject* const* const dicts = needed.empty() ? nullptr : dicts_.data() + first;
  const auto refused = [&](size_t i, const char* what, const char* why) {
    std::ostringstream out;
    out << what << "param_groups[" << group << "]['params'][" << i << "] " << why;
    return out.str();
  };
  rows_[group].reserve(count);
  for (size_t i = 0; i < count; ++i) {
    PyObject* const local = local_tensor(params[i]);
    if (!local) return refused(i, "", "is a tensor subclass");
    const at::Tensor& grad = THPVariable_Unpack(params[i]).unsafeGetTensorImpl()->grad();
    if (!grad.defined()) continue;
    ParamRow& row = rows_[group].emplace_back(i, &THPVariable_Unpack(local));
    row.tensors[kParam] = row.param;
    row.tensors[kGrad] = &grad;
    StateObjects objects{};
    if (dicts && dicts[i]) {
      OrderedReader state(dicts[i]);
      for (size_t k = 0; k < needed.size(); ++k) objects[k] = state.find(needed[k].name.ptr());
    }
    bool found = true;
    if (local != params[i]) {
      if (const char* why = localize(params[i], needed, row, objects, found))
        return refused(i, "", why);
    }
    found &= find_state(row, objects, needed);
    if (found && missing.empty() && add_plain(row)) continue;
    if (!device_) device_ = row.param->device();
    if (const char* why = why_not_param(*row.param, *device_)) return refused(i, "", why);
    if (const char* why = why_not_grad(*row.tensors[kGrad], *device_))
      return refused(i, "the gradient of ", why);
    if (!found || !is_usable(row)) {
      missing.append(py::handle(params[i]));
    } else if (missing.empty()) {
      add(row);
    }
  }
  return std::nullopt;
}

std::optional<std::string> ParamTable::why_not_together(size_t group) const {
  std::vector<MemoryUse> uses;
  for (const ParamRow& row : rows_[group]) {
    const MemoryRange range(row.param->const_data_ptr(), static_cast<int64_t>(row.param->nbytes()));
    uses.push_back({range, "params", static_cast<int64_t>(row.place), true});
  }
  const std::optional<Overlap> found = find_overlap(std::move(uses));
  if (!found) return std::nullopt;
  const auto name_of = [&](const MemoryUse& use) {
    return c10::str("param_groups[", group, "]['params'][", use.index, ']');
  };
  return c10::str(name_of(found->first), " shares memory with ", name_of(found->second));
}

void ParamTable::mark_params_written() const {
  for (const ParamRow& row : std::views::join(rows_)) {
    mark_written(row.param->unsafeGetTensorImpl());
    if (row.dtensor) mark_written(row.dtensor->unsafeGetTensorImpl());
  }
}

}  // namespace amp_ext
