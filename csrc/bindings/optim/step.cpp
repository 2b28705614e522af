// Makes the steps of this package's optimizers.
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "backends/backends.h"
#include "checks/python.h"
#include "optim/optim.h"
#include "optim/param_table.h"

namespace py = pybind11;

namespace amp_ext {
namespace {

// found_inf, inv_scale, norm and max_norm, as amp_ext.optim._step.StepScalars has them.
using ScalarTuple = std::tuple<at::Tensor, std::optional<at::Tensor>, std::optional<at::Tensor>,
                               std::optional<double>>;

std::optional<at::Tensor> on(at::Device device, const std::optional<at::Tensor>& tensor) {
  if (!tensor || (tensor->device() == device && tensor->scalar_type() == at::kFloat)) return tensor;
  return tensor->to(tensor->options().device(device).dtype(at::kFloat), !device.is_cpu());
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

// The memory of a group's last checked step, in which nothing written overlaps anything else. A
// step in the same memory is not checked again: a check takes 0.2 us a parameter.
class Apart {
 public:
  void keep(const UpdateList& list, const std::vector<MemoryUse>& uses) {
    refs_.assign(list.refs, list.refs + list.size);
    written_.clear();
    for (const MemoryUse& use : uses) {
      if (use.is_written && use.index >= 0) written_.push_back(use.range);
    }
    std::ranges::sort(written_, {}, &MemoryRange::begin);
  }

  // Returns whether a step has the same memory, without an overlap. Gradients and scalars may have
  // moved, as gradients do in most training: they are compared with what is written.
  bool has(const UpdateList& list, const StepScalars& scalars) const {
    if (static_cast<int64_t>(refs_.size()) != list.size) return false;
    const MemoryRange flag = range_of(scalars.found_inf);
    for (int64_t i = 0; i < list.size; ++i) {
      UpdateRef ref = list.refs[i];
      const MemoryRange grad(ref.grad, ref.numel * size_of(ref.grad_dtype));
      const bool has_moved = ref.grad != refs_[i].grad;
      ref.grad = refs_[i].grad;
      if (!(ref == refs_[i]) || grad.overlaps(flag) || (has_moved && is_written(grad)))
        return false;
    }
    for (const float* const read : {scalars.lr, scalars.inv_scale, scalars.norm}) {
      const MemoryRange range = range_of(read);
      if (is_written(range) || range.overlaps(flag)) return false;
    }
    return !is_written(flag);
  }

 private:
  static MemoryRange range_of(const float* scalar) {
    return scalar ? MemoryRange(scalar, sizeof(float)) : MemoryRange();
  }
  bool is_written(const MemoryRange& range) const {
    const auto next = std::ranges::lower_bound(written_, range.end, {}, &MemoryRange::begin);
    return next != written_.begin() && next[-1].overlaps(range);
  }

  std::vector<UpdateRef> refs_;
  std::vector<MemoryRange> written_;  // by address
};

// Returns whether a step releases the GIL: its launches run Python code, as the Triton kernels and
// verifications do, or take long on a CPU.
template <class Args>
bool releases_gil(const char* op, const std::vector<Updates>& all, const std::vector<Args>& args) {
  constexpr int64_t kLongPass = 1 << 18;  // elements
  int64_t cpu_numel = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    const at::Device device = all[i].device();
    const Backend& backend = choose(op, device);
    if (&backend == &triton_backend() ||
        !is_verified(backend, family_of(args[i]), device, /*known_only=*/true).value_or(false))
      return true;
    const UpdateList& list = args[i].list;
    for (int64_t k = 0; device.is_cpu() && k < list.size; ++k) cpu_numel += list.refs[k].numel;
  }
  return cpu_numel >= kLongPass;
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
    ParamTable table(param_groups);
    py::list none;
    for (size_t group = 0; group < table.groups(); ++group) {
      const auto take_none = [](const ParamRow&) { return false; };
      if (auto why = table.read(group, {}, none, take_none, [](const ParamRow&) {})) return why;
      if (auto why = table.why_not_together(group)) return why;
    }
    return std::nullopt;
    END_HANDLE_TH_ERRORS_PYBIND
  }

  // Makes the step of all groups with the states of these names. Returns none after the step, else
  // the reason for no step. Everything is read and checked before anything is written.
  template <class Op>
  std::optional<StepRefusal> launch(py::handle param_groups, py::handle state,
                                    const std::vector<std::vector<py::str>>& needed,
                                    const std::vector<typename Op::Group>& groups,
                                    const std::optional<ScalarTuple>& tuple) {
    HANDLE_TH_ERRORS
    const at::NoGradGuard no_grad;
    ParamTable table(param_groups, state);
    apart_.resize(table.groups());

    std::vector<Updates> all;
    std::vector<typename Op::Args> args;
    std::vector<ScalarTensors> scalars;  // kept for the launch
    std::vector<py::list> missing(table.groups());
    bool is_complete = true;
    all.reserve(table.groups());
    for (size_t group = 0; group < table.groups(); ++group) {
      Updates* updates = nullptr;
      const auto add_plain = [&](const ParamRow& row) {
        return is_complete && updates && updates->add_plain(row.tensors, row.place);
      };
      const auto add_checked = [&](const ParamRow& row) {
        if (!is_complete) return;
        if (!updates) {
          updates = &all.emplace_back(Op::kOp, Op::kNames, table.device());
          updates->reserve(table.size(group));
        }
        updates->add_checked(row.tensors, row.place);
      };
      if (auto why = table.read(group, states_of(needed.at(group)), missing[group], add_plain,
                                add_checked))
        return StepRefusal(*why);
      is_complete &= missing[group].empty();
      if (updates && is_complete) {
        const at::Device device = updates->device();
        ScalarTensors& own = scalars.emplace_back(scalars_on(device, tuple));
        const auto options = std::apply(
            [&](const py::object& lr, auto... others) {
              return typename Op::Options{learning_rate(lr, device, own), others...};
            },
            groups.at(group));
        args.push_back({updates->list(), options, updates->add_scalars(own)});
        const auto& [list, _, step_scalars] = args.back();
        if (!updates->has_copies() && apart_[group].has(list, step_scalars)) continue;
        if (auto why = table.why_not_together(group)) return StepRefusal(*why);
        const std::vector<MemoryUse> uses = updates->uses();
        check_overlap(Op::kOp, uses);
        apart_[group].keep(list, uses);
      } else if (auto why = table.why_not_together(group)) {
        return StepRefusal(*why);
      }
    }
    if (!is_complete) return StepRefusal(std::move(missing));
    RECORD_FUNCTION(Op::kOp, c10::ArrayRef<const c10::IValue>{});
    std::vector<at::Tensor> kept;  // other threads may drop states without the GIL
    std::optional<py::gil_scoped_release> released;
    if (releases_gil(Op::kOp, all, args)) {
      for (size_t group = 0; group < table.groups(); ++group) {
        for (const ParamRow& row : table.rows(group)) {
          for (const at::Tensor* const tensor : row.tensors) {
            if (tensor) kept.push_back(*tensor);
          }
        }
      }
      released.emplace();
    }
    for (size_t i = 0; i < all.size(); ++i) run(Op::kOp, all[i].device(), Op::kLaunch, args[i]);
    released.reset();
    table.mark_params_written();
    return std::nullopt;
    END_HANDLE_TH_ERRORS_PYBIND
  }

 private:
  std::vector<Apart> apart_;  // by group
};

}  // namespace

void bind_optim(py::module_& m) {
  py::class_<Step>(m, "OptimizerStep")
      .def(py::init<>())
      .def("why_not", &Step::why_not)
      .def("adam", &Step::launch<Adam>)
      .def("sgd", &Step::launch<Sgd>);
}

}  // namespace amp_ext
