// The tensors of an optimizer's step, from its param_groups and state without a loop in Python.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

namespace amp_ext {

// The tensors of a parameter's state, by the names that torch's optimizers give them;
// master_param is this package's.
namespace state {
enum Name : size_t { step, exp_avg, exp_avg_sq, max_exp_avg_sq, momentum_buffer, master_param };
}
constexpr std::array kStateNames{"step",           "exp_avg",         "exp_avg_sq",
                                 "max_exp_avg_sq", "momentum_buffer", "master_param"};

// A parameter that has a gradient. Of the state, null is what its group does not need.
struct ParamRow {
  const at::Tensor* param;
  const at::Tensor* grad;
  std::array<const at::Tensor*, kStateNames.size()> state;
};

// Everything is read anew for each step, so that nothing can be out of date: .grad, .data, groups
// and states may have been replaced since the last one. Kept from step to step is only where the
// state of each parameter was, to be found there again. Tensors are borrowed: rows are valid until
// Python code runs.
class ParamTable {
 public:
  ParamTable();

  // Reads parameters and gradients. Returns why kernels cannot make this step, if so.
  std::optional<std::string> read(pybind11::handle param_groups);

  // Reads what each group needs of the states of the parameters just read. Returns, for each group,
  // the parameters for which something is missing or not as kernels need it: `step` a float32
  // number on the parameter's device, all else in the order of the parameter's elements, and since
  // the last step no one else has written a parameter that has a master. Then rows are not
  // complete.
  std::vector<pybind11::list> read_state(pybind11::handle state,
                                         const std::vector<std::vector<std::string>>& needed);

  // To be called after the step.
  void note_written();

  size_t groups() const { return groups_.size(); }
  // The rows of a group.
  c10::ArrayRef<ParamRow> rows(size_t group) const {
    return c10::ArrayRef<ParamRow>(rows_).slice(groups_[group].first_row, groups_[group].rows);
  }

 private:
  struct Group {
    pybind11::object params;  // keeps the parameters alive
    size_t first_param, params_count;
    size_t first_row, rows;
  };
  // A parameter with a master as a step has left it.
  struct Written {
    const at::TensorImpl* param = nullptr;
    const void* data = nullptr;
    int64_t version = 0;
    bool operator==(const Written&) const = default;
    static Written of(const at::Tensor& param);
  };
  using StateObjects = std::array<PyObject*, kStateNames.size()>;

  std::optional<std::string> read_group(pybind11::handle group, size_t index);
  bool find_dicts(PyObject* state);
  StateObjects objects_of(PyObject* dict);
  std::optional<state::Name> name_of(PyObject* key);

  std::vector<Group> groups_;
  std::vector<PyObject*> params_;       // of all groups
  std::vector<PyObject*> dicts_;        // the states of these
  std::vector<size_t> param_of_row_;    // index into params_
  std::vector<size_t> param_of_entry_;  // of optimizer.state
  std::vector<ParamRow> rows_;
  std::vector<Written> written_;  // by row
  // What a key of a state was last, beside the interned name: a checkpoint has keys of its own.
  std::array<pybind11::object, kStateNames.size()> names_, other_names_;
};

void bind_optim(pybind11::module_& m);

}  // namespace amp_ext
