// The steps of this package's optimizers.
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "backends/backends.h"
#include "checks/dtensor.h"
#include "checks/python.h"
#include "optim/optim.h"
#include "optim/param_table.h"

namespace py = pybind11;

namespace amp_ext {
namespace {

// found_inf, inv_scale, norm and max_norm, as amp_ext.optim._scalars.StepScalars has them.
using GivenScalars = std::tuple<at::Tensor, std::optional<at::Tensor>, std::optional<at::Tensor>,
                                std::optional<double>>;

at::Tensor on(at::Device device, const at::Tensor& tensor) {
  if (tensor.device() == device && tensor.scalar_type() == at::kFloat) return tensor;
  return tensor.to(tensor.options().device(device).dtype(at::kFloat), !device.is_cpu());
}

std::optional<at::Tensor> on(at::Device device, const std::optional<at::Tensor>& tensor) {
  return tensor ? std::optional(on(device, *tensor)) : std::nullopt;
}

ScalarTensors scalars_on(at::Device device, const std::optional<GivenScalars>& given) {
  if (!given) return {};
  const auto& [found_inf, inv_scale, norm, max_norm] = *given;
  return {std::nullopt, on(device, found_inf), on(device, inv_scale), on(device, norm), max_norm};
}

// A learning rate, a number or a tensor. One on the CPU is read there and then; another is read by
// the kernels.
double learning_rate(py::handle lr, at::Device device, ScalarTensors& scalars) {
  if (!THPVariable_Check(lr.ptr())) return lr.cast<double>();
  const at::Tensor& tensor = THPVariable_Unpack(lr.ptr());
  if (tensor.device().is_cpu() && !device.is_cpu()) return tensor.item<double>();
  scalars.tensor_lr = on(device, tensor);
  return 0;
}

// What a group's row is to an update. A master is what is updated, and its parameter is the copy.
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

// Whether what a step writes shares memory with anything. To find that out takes 0.1 us a
// parameter; a step that writes what the last one wrote looks only at what it reads elsewhere.
class Apart {
 public:
  bool is_known(const UpdateList& list, const StepScalars& scalars) const {
    if (list.size == 0 || list.size != static_cast<int64_t>(refs_.size())) return false;
    const MemoryRange found_inf = of(scalars.found_inf);
    for (const float* const scalar : {scalars.lr, scalars.inv_scale, scalars.norm}) {
      if (overlap(of(scalar), found_inf) || is_written(of(scalar))) return false;
    }
    if (is_written(found_inf)) return false;
    for (int64_t i = 0; i < list.size; ++i) {
      const UpdateRef &now = list.refs[i], &before = refs_[i];
      const MemoryRange grad(now.grad, now.numel * size_of(now.grad_dtype));
      if (!writes_as(now, before) || overlap(grad, found_inf)) return false;
      const bool reads_as = now.grad == before.grad && now.grad_dtype == before.grad_dtype;
      if (!reads_as && is_written(grad)) return false;
    }
    return true;
  }

  void check(const Updates& updates) {
    const UpdateList list = updates.list();
    refs_.clear();
    updates.close();
    refs_.assign(list.refs, list.refs + list.size);
    written_.clear();
    for (const UpdateRef& ref : refs_) {
      for (const MemoryRange& range : written_by(ref)) {
        if (!range.is_empty()) written_.push_back(range);
      }
    }
    std::ranges::sort(written_, {}, &MemoryRange::begin);
  }

 private:
  static std::array<MemoryRange, 6> written_by(const UpdateRef& u) {
    const auto range = [&](const void* data, DType dtype) {
      return data ? MemoryRange(data, u.numel * size_of(dtype)) : MemoryRange();
    };
    return {range(u.param, u.param_dtype),
            range(u.exp_avg, u.exp_avg_dtype),
            range(u.exp_avg_sq, u.exp_avg_sq_dtype),
            range(u.max_exp_avg_sq, u.exp_avg_sq_dtype),
            range(u.copy, u.copy_dtype),
            of(u.step)};
  }

  static bool writes_as(const UpdateRef& a, const UpdateRef& b) {
    return a.param == b.param && a.exp_avg == b.exp_avg && a.exp_avg_sq == b.exp_avg_sq &&
           a.max_exp_avg_sq == b.max_exp_avg_sq && a.copy == b.copy && a.step == b.step &&
           a.numel == b.numel && a.param_dtype == b.param_dtype &&
           a.exp_avg_dtype == b.exp_avg_dtype && a.exp_avg_sq_dtype == b.exp_avg_sq_dtype &&
           a.copy_dtype == b.copy_dtype;
  }

  static MemoryRange of(const float* scalar) {
    return scalar ? MemoryRange(scalar, sizeof(float)) : MemoryRange();
  }

  bool is_written(const MemoryRange& range) const {
    const auto behind = std::ranges::lower_bound(written_, range.end, {}, &MemoryRange::begin);
    return behind != written_.begin() && overlap(behind[-1], range);
  }

  std::vector<UpdateRef> refs_;
  std::vector<MemoryRange> written_;  // by address
};

// Elements from which on a step is long enough on a CPU to let other Python threads run.
constexpr int64_t kLongStep = 1 << 18;

// Releases the GIL during launches that are long or run Python code, and keeps what they use alive
// until it is destroyed.
class GilFreeLaunches {
 public:
  GilFreeLaunches(const char* op, Family family, const ParamTable& table,
                  const std::vector<Updates>& all) {
    int64_t numel = 0;
    bool is_quick = true;
    for (const Updates& updates : all) {
      const Backend& backend = choose(op, updates.device());
      is_quick &= &backend != &triton_backend() && is_known(backend, family, updates.device());
      const UpdateList list = updates.list();
      for (int64_t i = 0; updates.device().is_cpu() && i < list.size; ++i)
        numel += list.refs[i].numel;
    }
    if (is_quick && numel < kLongStep) return;
    for (const ParamRow& row : table.rows()) {
      for (const at::Tensor* const tensor : tensors_of(row)) {
        if (tensor) owners_.push_back(*tensor);
      }
    }
    params_ = table.params();
    release_.emplace();
  }

  void end() { release_.reset(); }

 private:
  std::vector<at::Tensor> owners_;
  std::vector<py::object> params_;
  std::optional<py::gil_scoped_release> release_;
};

// What is not a step: why kernels cannot make it, or the parameters of each group whose state is
// not complete.
using NoStep = std::variant<std::string, std::vector<py::list>>;

// A step of an optimizer. It keeps nothing alive from step to step.
class Step {
 public:
  // Why kernels cannot make the step that is due, if so.
  std::optional<std::string> why_not(py::handle param_groups) {
    HANDLE_TH_ERRORS
    const Opened opened(*this);
    table_.open(param_groups);
    py::list none;
    for (size_t group = 0; group < table_.groups(); ++group) {
      const auto pass = [](const ParamRow&, auto) { return false; };
      if (auto why = table_.read(group, {}, /*renewed=*/false, none, pass)) return why;
      if (auto why = table_.why_not_together(group)) return why;
    }
    return std::nullopt;
    END_HANDLE_TH_ERRORS_PYBIND
  }

  // lr, beta1, beta2, eps, weight_decay, decoupled, maximize
  using AdamGroup = std::tuple<py::object, double, double, double, double, bool, bool>;
  // lr, momentum, dampening, weight_decay, nesterov, maximize
  using SgdGroup = std::tuple<py::object, double, double, double, bool, bool>;
  using Names = std::vector<std::vector<std::string>>;

  // Launch the step of all groups, which need the states of these names. None if done. Where states
  // are missing, the gradients of DTensors have been given the placements of their parameters.
  // `renewed` is that of ParamTable::read.
  std::optional<NoStep> adam(py::handle param_groups, py::handle state, const Names& needed,
                             bool renewed, const std::vector<AdamGroup>& groups,
                             bool stochastic_rounding, const std::optional<GivenScalars>& scalars) {
    HANDLE_TH_ERRORS
    const auto options = [&](const AdamGroup& group, double lr) -> AdamOptions {
      const auto& [_, beta1, beta2, eps, weight_decay, decoupled, maximize] = group;
      return {lr, beta1, beta2, eps, weight_decay, decoupled, maximize, stochastic_rounding};
    };
    return launch<AdamArgs>(kAdam, kAdamNames, Family::adam, adam_, param_groups, state, needed,
                            renewed, groups, options, scalars);
    END_HANDLE_TH_ERRORS_PYBIND
  }

  std::optional<NoStep> sgd(py::handle param_groups, py::handle state, const Names& needed,
                            bool renewed, const std::vector<SgdGroup>& groups,
                            bool stochastic_rounding, const std::optional<GivenScalars>& scalars) {
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
  // Of the table, for one call. Another thread may come while the GIL is released.
  class Opened {
   public:
    explicit Opened(Step& step) : step_(step) {
      TORCH_CHECK(!step.is_open_,
                  "an optimizer's step() was called while another thread makes one");
      step.is_open_ = true;
    }
    Opened(const Opened&) = delete;
    ~Opened() {
      step_.table_.close();
      step_.is_open_ = false;
    }

   private:
    Step& step_;
  };

  // Gradients that are placed otherwise than their DTensors.
  static void spread_grads(const std::vector<py::list>& missing) {
    for (const py::list& params : missing) {
      for (const py::handle param : params) {
        if (is_dtensor(param.ptr())) spread_grad_as_param(param.ptr());
      }
    }
  }

  // Everything is read and checked before anything is written.
  template <class Args, class Group, class OptionsOf>
  std::optional<NoStep> launch(const char* op, const RoleNames& names, Family family,
                               void (*launch)(at::Device, const Args&), py::handle param_groups,
                               py::handle state, const Names& needed, bool renewed,
                               const std::vector<Group>& groups, const OptionsOf& options_of,
                               const std::optional<GivenScalars>& given) {
    const at::NoGradGuard no_grad;
    const Opened opened(*this);
    table_.open(param_groups, state);
    apart_.resize(table_.groups());

    std::vector<Updates> all;
    std::vector<Args> args;
    std::vector<ScalarTensors> scalars;  // kept for the launch
    std::vector<py::list> missing(table_.groups());
    bool is_complete = true;
    all.reserve(table_.groups());
    for (size_t group = 0; group < table_.groups(); ++group) {
      std::vector<state::Name> indices;
      for (const std::string& name : needed.at(group)) indices.push_back(state_name(name));
      Updates* updates = nullptr;
      const auto add = [&](const ParamRow& row, ParamTable::Rows rows) {
        if (!updates) {
          updates = &all.emplace_back(op, names, table_.device());
          updates->reserve(table_.size(group));
        }
        const UpdateTensors tensors = tensors_of(row);
        if (rows == ParamTable::Rows::plain) return updates->add_plain(tensors);
        updates->add_checked(tensors);
        return true;
      };
      if (auto why = table_.read(group, indices, renewed, missing[group], add)) return NoStep(*why);
      is_complete &= missing[group].empty();
      if (!is_complete) {
        if (auto why = table_.why_not_together(group)) return NoStep(*why);
      }
      if (!updates || !is_complete) continue;
      const at::Device device = updates->device();
      ScalarTensors& own = scalars.emplace_back(scalars_on(device, given));
      const double lr = learning_rate(std::get<0>(groups.at(group)), device, own);
      args.push_back({updates->list(), options_of(groups[group], lr), updates->add_scalars(own)});
      if (apart_[group].is_known(updates->list(), args.back().scalars)) continue;
      if (auto why = table_.why_not_together(group)) return NoStep(*why);
      apart_[group].check(*updates);
    }
    if (!is_complete) {
      spread_grads(missing);
      return NoStep(std::move(missing));
    }
    RECORD_FUNCTION(op, c10::ArrayRef<const c10::IValue>{});
    {
      GilFreeLaunches free(op, family, table_, all);
      for (size_t i = 0; i < all.size(); ++i) launch(all[i].device(), args[i]);
      free.end();
      table_.finish_step();
    }
    return std::nullopt;
  }

  ParamTable table_;
  bool is_open_ = false;
  std::vector<Apart> apart_;
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
