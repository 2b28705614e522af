// Finds the tensors of an optimizer's step in param_groups and state, without a loop in Python.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <pybind11/pybind11.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "optim/optim.h"
#include "params/params.h"

namespace amp_ext {

// A tensor of a parameter's state: its name, as in torch's optimizers, and its role. A master,
// which this package adds, takes the parameter's role; the parameter is its copy.
struct State {
  pybind11::str name;
  Role role;
};
std::vector<State> states_of(const std::vector<pybind11::str>& names);

// A parameter that has a gradient, its gradient, and the tensors of its state that its group needs,
// else null. The row of a DTensor consists of its local tensors.
struct ParamRow {
  size_t place;  // of the parameter in its group
  const at::Tensor* param;
  UpdateTensors tensors{};
  const at::Tensor* dtensor = nullptr;  // if the parameter is one
};

// The objects of a parameter's state, in the order of the needed states.
using StateObjects = std::array<PyObject*, kRoles>;

// The parameters and states of an optimizer, read anew for each step: .grad, .data, groups and
// states may have been replaced since the last step. Tensors are borrowed: rows are valid until
// Python code runs.
class ParamTable {
 public:
  // Finds the parameters of all groups, and their states if `state` is given.
  explicit ParamTable(pybind11::handle param_groups, pybind11::handle state = {});
  size_t groups() const { return params_.groups(); }
  size_t size(size_t group) const { return params_.size(group); }

  // Reads the parameters of a group that have gradients, and the states of these names. Returns why
  // kernels do not serve them, or none. Offers each row to `add_plain`, which checks and
  // takes common ones. Checks others here, and calls `add` while they are in the processor's cache.
  //
  // `missing` receives the parameters with a state that is missing or not as kernels need it. No
  // more rows are added then. Kernels need a `step` that is a float32 number on the parameter's
  // device, and other states in the order of the parameter's elements. The gradient and the states
  // of a DTensor must have its placements.
  std::optional<std::string> read(size_t group, const std::vector<State>& needed,
                                  pybind11::list& missing,
                                  c10::function_ref<bool(const ParamRow&)> add_plain,
                                  c10::function_ref<void(const ParamRow&)> add);

  // Returns why kernels do not serve the rows of a group together, or none. Parameters that share
  // memory are updated one after the other: one launch does not do so.
  std::optional<std::string> why_not_together(size_t group) const;

  // The device of the first parameter that has been read.
  at::Device device() const { return *device_; }

  // The rows of a group that has been read already.
  const std::vector<ParamRow>& rows(size_t group) const { return rows_[group]; }

  // Bumps the versions of parameters after the launch, for autograd. States keep their versions, as
  // in torch's fused steps.
  void mark_params_written() const;

 private:
  void find_states(PyObject* state);
  bool find_state(ParamRow& row, const StateObjects& objects, const std::vector<State>& needed);

  Params params_;
  std::vector<PyObject*> dicts_;             // the states of the parameters
  std::vector<std::vector<ParamRow>> rows_;  // by group
  std::optional<at::Device> device_;
};

}  // namespace amp_ext
