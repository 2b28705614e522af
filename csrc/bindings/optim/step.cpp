// The steps of this package's optimizers.
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "backends/backends.h"
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

// What a group's row is to an update. A master is what is updated, its parameter the copy.
UpdateTensors tensors_of(const ParamRow& row) {
  const at::Tensor* const master = row.state[state::master_param];
  UpdateTensors tensors{};
  tensors[kParam] = master ? master : row.param;
  tensors[kGrad] = row.grad;
  tensors[kExpAvg] =
      row.state[state::exp_avg] ? row.state[state::exp_avg] : row.state[state::momentum_buffer];
  tensors[kExpAvgSq] = row.state[state::exp_avg_sq];
  tensors[kMaxExpAvgSq] = row.state[state::max_exp_avg_sq];
  tensors[kCopy] = master ? row.param : nullptr;
  tensors[kStep] = row.state[state::step];
  return tensors;
}

void add_rows(Updates& updates, c10::ArrayRef<ParamRow> rows) {
  const size_t n = rows.size();
  updates.reserve(n);
  const auto for_each_tensor = [](const ParamRow& row, const auto& visit) {
    visit(row.param->unsafeGetTensorImpl());
    visit(row.grad->unsafeGetTensorImpl());
    for (const at::Tensor* const tensor : row.state) {
      if (tensor) visit(tensor->unsafeGetTensorImpl());
    }
  };
  for (size_t i = 0; i < n; ++i) {
    if (i + 2 * kAhead < n) for_each_tensor(rows[i + 2 * kAhead], prefetch_tensor);
    if (i + kAhead < n) for_each_tensor(rows[i + kAhead], prefetch_links);
    updates.add(tensors_of(rows[i]));
  }
}

// Elements from which on a pass is long enough on a CPU to let other Python threads run.
constexpr int64_t kLongStep = 1 << 18;

// Releases the GIL during a launch that is long or runs Python code, and keeps the tensors alive
// meanwhile.
class GilFreeLaunch {
 public:
  GilFreeLaunch(ParamTable& table, const std::vector<Updates>& all, Family op) {
    int64_t numel = 0;
    bool is_quick = true;
    for (const Updates& updates : all) {
      const Backend& backend = choose("amp_ext", updates.device());
      is_quick &= &backend != &triton_backend() && is_known(backend, op, updates.device());
      for (int64_t i = 0; updates.device().is_cpu() && i < updates.list().size; ++i)
        numel += updates.list().refs[i].numel;
    }
    if (is_quick && numel < kLongStep) return;
    for (size_t group = 0; group < table.groups(); ++group) {
      for (const ParamRow& row : table.rows(group)) {
        for (const at::Tensor* const tensor : tensors_of(row)) {
          if (tensor) owners_.push_back(*tensor);
        }
      }
    }
    release_.emplace();
  }

 private:
  std::vector<at::Tensor> owners_;
  std::optional<py::gil_scoped_release> release_;
};

// Steps all groups; `options` are theirs, with the learning rate first. Everything is checked
// before anything is written.
template <class Args, class Options, class Given>
void step_groups(const char* op, const RoleNames& names, Family family, ParamTable& table,
                 const std::vector<Given>& options, const Options& options_of,
                 const std::optional<GivenScalars>& given,
                 void (*launch)(at::Device, const Args&)) {
  const at::NoGradGuard no_grad;
  std::vector<Updates> all;
  std::vector<Args> args;
  std::vector<ScalarTensors> scalars;
  all.reserve(table.groups());
  for (size_t group = 0; group < table.groups(); ++group) {
    const auto rows = table.rows(group);
    if (rows.empty()) continue;
    const at::Device device = rows[0].param->device();
    ScalarTensors& own = scalars.emplace_back(scalars_on(device, given));
    const double lr = learning_rate(std::get<0>(options[group]), device, own);
    Updates& updates = all.emplace_back(op, names, device);
    add_rows(updates, rows);
    args.push_back({updates.list(), options_of(options[group], lr), updates.add_scalars(own)});
    updates.close();
  }
  {
    const GilFreeLaunch free(table, all, family);
    for (size_t i = 0; i < all.size(); ++i) launch(all[i].device(), args[i]);
  }
  for (const Updates& updates : all) updates.mark_written();
  table.note_written();
}

// lr, beta1, beta2, eps, weight_decay, decoupled, maximize
using AdamGroup = std::tuple<py::object, double, double, double, double, bool, bool>;
// lr, momentum, dampening, weight_decay, nesterov, maximize
using SgdGroup = std::tuple<py::object, double, double, double, bool, bool>;

void adam_step(ParamTable& table, const std::vector<AdamGroup>& groups, bool stochastic_rounding,
               const std::optional<GivenScalars>& scalars) {
  HANDLE_TH_ERRORS
  const auto options = [&](const AdamGroup& group, double lr) -> AdamOptions {
    const auto& [_, beta1, beta2, eps, weight_decay, decoupled, maximize] = group;
    return {lr, beta1, beta2, eps, weight_decay, decoupled, maximize, stochastic_rounding};
  };
  step_groups<AdamArgs>(kAdam, kAdamNames, Family::adam, table, groups, options, scalars, adam_);
  END_HANDLE_TH_ERRORS_PYBIND
}

void sgd_step(ParamTable& table, const std::vector<SgdGroup>& groups, bool stochastic_rounding,
              const std::optional<GivenScalars>& scalars) {
  HANDLE_TH_ERRORS
  const auto options = [&](const SgdGroup& group, double lr) -> SgdOptions {
    const auto& [_, momentum, dampening, weight_decay, nesterov, maximize] = group;
    return {lr, momentum, dampening, weight_decay, nesterov, maximize, stochastic_rounding};
  };
  step_groups<SgdArgs>(kSgd, kSgdNames, Family::sgd, table, groups, options, scalars, sgd_);
  END_HANDLE_TH_ERRORS_PYBIND
}

}  // namespace

void bind_optim(py::module_& m) {
  py::class_<ParamTable>(m, "ParamTable")
      .def(py::init<>())
      .def("read", &ParamTable::read)
      .def("read_state", &ParamTable::read_state);
  m.def("adam_step", &adam_step);
  m.def("sgd_step", &sgd_step);
}

}  // namespace amp_ext
