// Makes the steps of this package's optimizers.
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "checks/dtensor.h"
#include "checks/python.h"
#include "optim/optim.h"
#include "optim/param_table.h"
#include "params/gil.h"

namespace py = pybind11;

namespace amp_ext {
namespace {

// found_inf, inv_scale, norm and max_norm, as amp_ext.optim._step.StepScalars has them.
using ScalarTuple = std::tuple<at::Tensor, std::optional<at::Tensor>, std::optional<at::Tensor>,
                               std::optional<double>>;

at::Tensor on(at::Device device, const at::Tensor& tensor) {
  if (tensor.device() == device && tensor.scalar_type() == at::kFloat) return tensor;
  return tensor.to(tensor.options().device(device).dtype(at::kFloat), !device.is_cpu());
}

std::optional<at::Tensor> on(at::Device device, const std::optional<at::Tensor>& tensor) {
  return tensor ? std::optional(on(device, *tensor)) : std::nullopt;
}

ScalarTensors scalars_on(at::Device device, const std::optional<ScalarTuple>& tuple) {
  if (!tuple) return {};
  const auto& [found_inf, inv_scale, norm, max_norm] = *tuple;
  return {std::nullopt, on(device, found_inf), on(device, inv_scale), on(device, norm), max_norm};
}

// Returns a learning rate that is a number, or a tensor on the CPU. Kernels read other tensors.
double learning_rate(py::handle lr, at::Device device, ScalarTensors& scalars) {
  if (!THPVariable_Check(lr.ptr())) return lr.cast<double>();
  const at::Tensor& tensor = THPVariable_Unpack(lr.ptr());
  if (tensor.device().is_cpu() && !device.is_cpu()) return tensor.item<double>();
  scalars.tensor_lr = on(device, tensor);
  return 0;
}

// Returns the tensors of an update. A master is updated in the place of its parameter, its copy.
UpdateTensors tensors_of(const ParamRow& row) {
  const at::Tensor* const master = row.state[state::master_param];
  UpdateTensors tensors{};
  tensors[kParam] = master ? master : row.param;
  tensors[kGrad] = row.grad;
  tensors[kExpAvg] =
      row.state[state::exp_avg] ? row.state[state::exp_avg] : row.state[state::momentum_buffer];
  tensors[kExpAvgSq] = row.state[state::exp_avg_sq];
  tensors[kMaxExpAvgSq] = row.state[state::max_exp_avg_sq];
  tensors[kCopy] = master ? row.param : row.state[state::autocast_copy];
  tensors[kStep] = row.state[state::step];
  return tensors;
}

// The addresses of a group's last step that overlap nothing. A step at the same addresses is not
// checked again: a check takes 0.1 us a parameter.
struct Apart {
  std::vector<UpdateRef> refs;
  std::array<const float*, 4> scalars{};

  bool has(const UpdateList& list, const std::array<const float*, 4>& others) const {
    return scalars == others && static_cast<int64_t>(refs.size()) == list.size &&
           std::memcmp(list.refs, refs.data(), refs.size() * sizeof(UpdateRef)) == 0;
  }
};

int64_t numel_of(const UpdateList& list) {
  int64_t numel = 0;
  for (int64_t i = 0; i < list.size; ++i) numel += list.refs[i].numel;
  return numel;
}

// The reason for no step: tensors that kernels do not serve, or each group's parameters with
// incomplete state.
using StepRefusal = std::variant<std::string, std::vector<py::list>>;

// The steps of an optimizer. The object keeps nothing alive from step to step.
class Step {
 public:
  // Returns why kernels cannot make a step with the present gradients, or none.
  std::optional<std::string> why_not(py::handle param_groups) {
    HANDLE_TH_ERRORS
    const std::unique_lock<std::mutex> lock = locked();
    ParamTable table(param_groups, {}, written_);
    py::list none;
    for (size_t group = 0; group < table.groups(); ++group) {
      if (auto why = table.read(group, {}, /*renewed=*/false, none, [](const ParamRow&) {}))
        return why;
      if (auto why = table.why_not_together(group)) return why;
    }
    return std::nullopt;
    END_HANDLE_TH_ERRORS_PYBIND
  }

  // lr, beta1, beta2, eps, weight_decay, decoupled, maximize
  using AdamGroup = std::tuple<py::object, double, double, double, double, bool, bool>;
  // lr, momentum, dampening, weight_decay, nesterov, maximize
  using SgdGroup = std::tuple<py::object, double, double, double, bool, bool>;
  using Names = std::vector<std::vector<std::string>>;

  // Launch the step of all groups with the states of these names. Return none after the step, else
  // the reason for no step. If states are missing, the gradients of DTensors have been given the
  // placements of their parameters. `renewed` is as for ParamTable::read.
  std::optional<StepRefusal> adam(py::handle param_groups, py::handle state, const Names& needed,
                                  bool renewed, const std::vector<AdamGroup>& groups,
                                  bool stochastic_rounding,
                                  const std::optional<ScalarTuple>& scalars) {
    HANDLE_TH_ERRORS
    const auto options = [&](const AdamGroup& group, double lr) -> AdamOptions {
      const auto& [_, beta1, beta2, eps, weight_decay, decoupled, maximize] = group;
      return {lr, beta1, beta2, eps, weight_decay, decoupled, maximize, stochastic_rounding};
    };
    return launch<AdamArgs>(kAdam, kAdamNames, Family::adam, adam_, param_groups, state, needed,
                            renewed, groups, options, scalars);
    END_HANDLE_TH_ERRORS_PYBIND
  }

  std::optional<StepRefusal> sgd(py::handle param_groups, py::handle state, const Names& needed,
                                 bool renewed, const std::vector<SgdGroup>& groups,
                                 bool stochastic_rounding,
                                 const std::optional<ScalarTuple>& scalars) {
    HANDLE_TH_ERRORS
    const auto options = [&](const SgdGroup& group, double lr) -> SgdOptions {
      const auto& [_, momentum, dampening, weight_decay, nesterov, maximize] = group;
      return {lr, momentum, dampening, weight_decay, nesterov, maximize, stochastic_rounding};
    };
    return launch<SgdArgs>(kSgd, kSgdNames, Family::sgd, sgd_, param_groups, state, needed, renewed,
                           groups, options, scalars);
    END_HANDLE_TH_ERRORS_PYBIND
  }

 private:
  // Locks the object for one call: another thread may come while the GIL is released.
  std::unique_lock<std::mutex> locked() {
    std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    TORCH_CHECK(lock, "an optimizer's step() was called while another thread makes one");
    return lock;
  }

  static void redistribute_grads(const std::vector<py::list>& missing) {
    for (const py::list& params : missing) {
      for (const py::handle param : params) {
        if (is_dtensor(param.ptr())) redistribute_grad(param.ptr());
      }
    }
  }

  // Everything is read and checked before anything is written.
  template <class Args, class Group, class OptionsOf>
  std::optional<StepRefusal> launch(const char* op, const RoleNames& names, Family family,
                                    void (*launch)(at::Device, const Args&),
                                    py::handle param_groups, py::handle state, const Names& needed,
                                    bool renewed, const std::vector<Group>& groups,
                                    const OptionsOf& options_of,
                                    const std::optional<ScalarTuple>& tuple) {
    const at::NoGradGuard no_grad;
    const std::unique_lock<std::mutex> lock = locked();
    ParamTable table(param_groups, state, written_);
    apart_.resize(table.groups());

    std::vector<Updates> all;
    std::vector<Args> args;
    std::vector<ScalarTensors> scalars;  // kept for the launch
    std::vector<py::list> missing(table.groups());
    bool is_complete = true;
    all.reserve(table.groups());
    for (size_t group = 0; group < table.groups(); ++group) {
      std::vector<state::Name> indices;
      for (const std::string& name : needed.at(group)) indices.push_back(state_name(name));
      Updates* updates = nullptr;
      const auto add = [&](const ParamRow& row) {
        if (!is_complete) return;
        if (!updates) {
          updates = &all.emplace_back(op, names, table.device());
          updates->reserve(table.size(group));
        }
        updates->add(tensors_of(row));
      };
      if (auto why = table.read(group, indices, renewed, missing[group], add))
        return StepRefusal(*why);
      is_complete &= missing[group].empty();
      std::optional<std::string> overlap;
      if (updates && is_complete) {
        const at::Device device = updates->device();
        ScalarTensors& own = scalars.emplace_back(scalars_on(device, tuple));
        const double lr = learning_rate(std::get<0>(groups.at(group)), device, own);
        args.push_back({updates->list(), options_of(groups[group], lr), updates->add_scalars(own)});
        const auto& [list, _, s] = args.back();
        const std::array<const float*, 4> addresses{s.lr, s.found_inf, s.inv_scale, s.norm};
        if (updates->has_copies() || !apart_[group].has(list, addresses)) {
          overlap = updates->overlap();
          if (!overlap) apart_[group] = {{list.refs, list.refs + list.size}, addresses};
        }
      }
      if (overlap || !is_complete) {
        if (auto why = table.why_not_together(group)) return StepRefusal(*why);
      }
      TORCH_CHECK(!overlap, *overlap);
    }
    if (!is_complete) {
      redistribute_grads(missing);
      return StepRefusal(std::move(missing));
    }
    RECORD_FUNCTION(op, c10::ArrayRef<const c10::IValue>{});
    std::vector<at::Tensor> kept;  // other threads may drop states without the GIL
    GilRelease gil;                // destroyed first
    for (const Updates& updates : all)
      gil.add(op, family, updates.device(), numel_of(updates.list()));
    for (size_t group = 0; gil.is_needed() && group < table.groups(); ++group) {
      for (const ParamRow& row : table.rows(group)) {
        for (const at::Tensor* const tensor : tensors_of(row)) {
          if (tensor) kept.push_back(*tensor);
        }
      }
    }
    gil.begin();
    for (size_t i = 0; i < all.size(); ++i) launch(all[i].device(), args[i]);
    gil.end();
    table.finish_step();
    return std::nullopt;
  }

  std::mutex mutex_;
  std::vector<std::optional<Written>> written_;  // by ParamRow::index
  std::vector<Apart> apart_;                     // by group
};

}  // namespace

void bind_optim(py::module_& m) {
  py::class_<Step>(m, "OptimizerStep")
      .def(py::init<>())
      .def("why_not", &Step::why_not)
      .def("adam", &Step::adam)
      .def("sgd", &Step::sgd);
}

}  // namespace amp_ext
