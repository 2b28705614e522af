// The tensors of an optimizer's step, from its param_groups and state without a loop in Python.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <pybind11/pybind11.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "checks/seen.h"

namespace amp_ext {

// The tensors of a parameter's state, by the names that torch's optimizers give them; the last two
// are this package's, the first of 16-bit parameters, the second of FP32 ones.
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

// A parameter that has a gradient. Of the state, null is what its group does not need. The row of a
// DTensor consists of its local tensors.
struct ParamRow {
  ParamRow(size_t index, const at::Tensor* param, const at::Tensor* grad)
      : index(index), param(param), grad(grad) {}

  size_t index;  // of the parameter, among those of all groups
  const at::Tensor* param;
  const at::Tensor* grad;
  std::array<const at::Tensor*, kStateNames.size()> state{};
  const at::Tensor* dtensor = nullptr;  // if the parameter is one
};

// Of a parameter's state, as they are needed.
using StateObjects = std::array<PyObject*, kStateNames.size()>;

// Everything is read anew for each step, so that nothing can be out of date: .grad, .data, groups
// and states may have been replaced since the last one. Kept from step to step is only where each
// parameter's state was, to be found there again. Tensors are borrowed: rows are valid until Python
// code runs.
class ParamTable {
 public:
  ParamTable();

  // Finds the parameters of all groups, and their states where these are given.
  void open(pybind11::handle param_groups, pybind11::handle state = {});
  size_t groups() const { return groups_.size(); }
  // Of a group's parameters.
  size_t size(size_t group) const { return groups_[group].count; }

  // Reads the parameters of a group that have gradients, and what is `needed` of their states.
  // Returns why kernels do not serve them, if so. Calls visit(row, Rows::plain) for each row, which
  // returns false and does nothing for one that is not plain: of contiguous tensors that kernels
  // serve. That is then looked at, and visited again as Rows::any. Rows before one that kernels do
  // not serve may have been visited.
  //
  // `missing` receives the parameters, and the call leaves out their rows, for which something is
  // missing or not as kernels need it: `step` a float32 number on the parameter's device, all else
  // in the order of the parameter's elements, the gradient and all but `step` of a DTensor placed
  // as it is, and since the last step no one else has written a parameter that has a master or a
  // copy, unless what was missing has just been `renewed`.
  enum class Rows { plain, any };
  using Visit = c10::function_ref<bool(const ParamRow&, Rows)>;
  std::optional<std::string> read(size_t group, const std::vector<state::Name>& needed,
                                  bool renewed, pybind11::list& missing, Visit visit);

  // Returns why kernels do not serve those rows of a group together, if so: parameters that share
  // memory are updated one after the other, which one launch does not do.
  std::optional<std::string> why_not_together(size_t group) const;

  // That of the first parameter that has been read.
  at::Device device() const { return rows_.front().param->device(); }

  // Keeps the parameters alive.
  std::vector<pybind11::object> params() const;

  // What has been read since open().
  const std::vector<ParamRow>& rows() const { return rows_; }

  // To be called after the launch: bumps the versions of parameters and of their copies, so that
  // autograd knows, and provides the copies to autocast. (Other states are nobody else's to watch,
  // and torch's fused optimizers bump no versions at all.)
  void finish_step();
  // To be called when all is done.
  void close();

 private:
  struct Group {
    pybind11::object params;  // a list or tuple
    size_t first, count;      // in params_
  };
  // A parameter with a master or a copy, as a step has left it.
  struct Written {
    Seen param;
    std::optional<Seen> dtensor;

    explicit Written(const ParamRow& row);
    bool is(const ParamRow& now) const;
  };

  void find_states(PyObject* state);
  void find_objects(PyObject* dict, const std::vector<state::Name>& needed,
                    StateObjects& objects) const;
  bool find_state(ParamRow& row, const StateObjects& objects,
                  const std::vector<state::Name>& needed, bool renewed);

  std::vector<Group> groups_;
  std::vector<PyObject*> params_;  // of all groups
  std::vector<PyObject*> dicts_;   // their states
  std::vector<ParamRow> rows_;
  std::vector<size_t> param_of_entry_;           // of optimizer.state, the index in params_
  std::vector<std::optional<Written>> written_;  // by ParamRow::index
  std::array<pybind11::object, kStateNames.size()> names_;  // interned
};

void bind_optim(pybind11::module_& m);

}  // namespace amp_ext
