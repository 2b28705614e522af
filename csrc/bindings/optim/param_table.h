// Finds the tensors of an optimizer's step in param_groups and state, without a loop in Python.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <pybind11/pybind11.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "checks/seen.h"
#include "params/params.h"

namespace amp_ext {

// The tensors of a parameter's state, by the names in torch's optimizers. This package adds masters
// of 16-bit parameters, and copies of FP32 ones.
namespace state {
enum Name : size_t {
  step,
  exp_avg,
  exp_avg_sq,
  max_exp_avg_sq,
  momentum_buffer,
  master_param,
  autocast_copy
};
}
constexpr std::array kStateNames{"step",           "exp_avg",         "exp_avg_sq",
                                 "max_exp_avg_sq", "momentum_buffer", "master_param",
                                 "autocast_copy"};
state::Name state_name(const std::string& name);

// A parameter that has a gradient, and the tensors of its state that its group needs, else null.
// The row of a DTensor consists of its local tensors.
struct ParamRow {
  ParamRow(size_t index, const at::Tensor* param, const at::Tensor* grad)
      : index(index), param(param), grad(grad) {}

  size_t index;  // of the parameter, among the parameters of all groups
  const at::Tensor* param;
  const at::Tensor* grad;
  std::array<const at::Tensor*, kStateNames.size()> state{};
  const at::Tensor* dtensor = nullptr;  // if the parameter is one
};

// The objects of a parameter's state, in the order of the needed names.
using StateObjects = std::array<PyObject*, kStateNames.size()>;

// A parameter with a master or a copy, as a step has left it. Ops on a DTensor bump its own version
// alone, and ops on its local tensor only that tensor's.
struct Written {
  explicit Written(const ParamRow& row) : param(*row.param) {
    if (row.dtensor) dtensor.emplace(*row.dtensor);
  }
  bool is(const ParamRow& now) const {
    return param.is(*now.param) && (now.dtensor ? dtensor && dtensor->is(*now.dtensor) : !dtensor);
  }

  Seen param;
  std::optional<Seen> dtensor;
};

// The parameters and states of an optimizer, read anew for each step: .grad, .data, groups and
// states may have been replaced since the last step. Tensors are borrowed: rows are valid until
// Python code runs.
class ParamTable {
 public:
  // Finds the parameters of all groups, and their states if `state` is given. `written` is kept
  // from step to step.
  ParamTable(pybind11::handle param_groups, pybind11::handle state,
             std::vector<std::optional<Written>>& written);
  size_t groups() const { return params_.groups(); }
  size_t size(size_t group) const { return params_.size(group); }

  // Reads the parameters of a group that have gradients, and the states of these names. Returns why
  // kernels do not serve them, or none. Visits each row at once, while its tensors are in the
  // processor's cache.
  //
  // `missing` receives the parameters with a state that is missing or not as kernels need it. No
  // more rows are visited then. Kernels need a `step` that is a float32 number on the parameter's
  // device, and other states in the order of the parameter's elements. The gradient and the states
  // of a DTensor must have its placements. A parameter with a master or a copy must not have been
  // written since the last step, unless missing states have just been `renewed`.
  using Visit = c10::function_ref<void(const ParamRow&)>;
  std::optional<std::string> read(size_t group, const std::vector<state::Name>& needed,
                                  bool renewed, pybind11::list& missing, Visit visit);

  // Returns why kernels do not serve the rows of a group together, or none. Parameters that share
  // memory are updated one after the other: one launch does not do so.
  std::optional<std::string> why_not_together(size_t group) const;

  // The device of the first parameter that has been read.
  at::Device device() const { return *device_; }

  // The rows of a group that has been read already.
  const std::vector<ParamRow>& rows(size_t group) const { return rows_[group]; }

  // Bumps the versions of parameters and of their copies after the launch, for autograd, and
  // provides the copies to autocast. Other states keep their versions, as in torch's fused steps.
  void finish_step();

 private:
  void find_states(PyObject* state);
  bool find_state(ParamRow& row, const StateObjects& objects,
                  const std::vector<state::Name>& needed, bool renewed);

  Params params_;
  std::vector<PyObject*> dicts_;             // the states of the parameters
  std::vector<std::vector<ParamRow>> rows_;  // by group
  std::optional<at::Device> device_;
  std::vector<std::optional<Written>>& written_;            // by ParamRow::index
  std::array<pybind11::object, kStateNames.size()> names_;  // interned
};

}  // namespace amp_ext
