// Runs the scaler's passes over an optimizer's gradients.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>
#include <pybind11/stl.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "backends/backends.h"
#include "checks/python.h"
#include "checks/tensors.h"
#include "scaler/optimizer_grads.h"

namespace py = pybind11;

namespace amp_ext {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

at::Tensor copy_to(const at::Tensor& tensor, at::Device device) {
  if (tensor.device() == device) return tensor;
  // A copy to the CPU must have arrived: kernels there read it at once.
  return tensor.to(tensor.options().device(device), /*non_blocking=*/!device.is_cpu());
}

at::Tensor filled_on(at::Device device, float value) {
  return at::full({}, value, at::TensorOptions(at::kFloat).device(device));
}

py::object device_object(at::Device device) {
  auto object = py::reinterpret_steal<py::object>(THPDevice_New(device));
  if (!object) throw py::error_already_set();
  return object;
}

// The scalars of a list, on its device. Lists on one device share them.
struct Scalars {
  at::Tensor inv_scale;
  at::Tensor found_inf;
};

// Returns the scalars of each list, without inv_scale. `flags` has the flags that the pass starts
// with, by device; a device without one gets a new flag. With `keeps` the pass writes copies of
// them: an error for a norm that is not finite must leave them as they are.
std::vector<Scalars> scalars_of(const char* op, const std::vector<GradList>& lists,
                                const py::dict& flags, bool keeps) {
  std::vector<Scalars> result;
  for (const GradList& list : lists) {
    const at::Device device = list.device();
    const auto same = std::ranges::find_if(
        result, [&](const Scalars& each) { return each.found_inf.device() == device; });
    if (same != result.end()) {
      result.push_back(Scalars(*same));
      continue;
    }
    const py::object key = device_object(device);
    at::Tensor flag;
    if (flags.contains(key)) {
      flag = tensor_of("found_inf", flags[key]);
      elements(op, "found_inf", flag, at::kFloat, device);
      if (keeps) flag = flag.clone();
    } else {
      flag = filled_on(device, 0);
    }
    result.push_back({{}, std::move(flag)});
  }
  return result;
}

// Launches an op on a list. The list and the scalars have been checked. args.found_inf receives the
// flag.
template <class Args>
void launch(const GradList& list, const at::Tensor& flag,
            Status (ListBackend::*method)(const Args&, Services&) const, Args args) {
  args.grads = list.args();
  args.found_inf = flag.mutable_data_ptr<float>();
  run(list.op(), list.device(), method, args);
  mark_written(flag.unsafeGetTensorImpl());
}

// Reduces flags and norms over all processes, and returns the total norm. Returns none without
// `norms`, or if gradients have no parts in other processes. `reduce` is a Reduction of
// amp_ext.scaler.processes, or None for one process.
OptionalTensor reduced(py::handle reduce, const OptimizerGrads& grads, py::dict& found_infs,
                       const std::vector<at::Tensor>* norms) {
  if (reduce.is_none()) return std::nullopt;
  py::object by_sharding = py::none();
  if (norms) {
    std::vector<std::vector<at::Tensor>> lists(grads.shardings().size());
    for (size_t i = 0; i < norms->size(); ++i)
      lists[grads.sharding_index(i)].push_back((*norms)[i]);
    by_sharding = py::cast(lists);
  }
  const py::object norm = reduce(found_infs, py::cast(grads.shardings()), by_sharding);
  return norm.is_none() ? std::nullopt : OptionalTensor(tensor_of("norm", norm));
}

// Combines the L2 norms of several lists into one on a device. Squares in fp64 cannot overflow.
at::Tensor total_norm(const std::vector<at::Tensor>& norms, at::Device device) {
  if (norms.empty()) return filled_on(device, 0);
  if (norms.size() == 1) return copy_to(norms[0], device);
  std::vector<at::Tensor> here;
  for (const at::Tensor& norm : norms) here.push_back(copy_to(norm, device));
  return at::linalg_vector_norm(at::stack(here), 2, std::nullopt, false, at::kDouble)
      .to(at::kFloat);
}

// Runs one pass over the gradients of `param_groups`, of one of these kinds:
//   check    reads them and flags values that are not finite.
//   norm     does the same, and returns the L2 norm of the unscaled gradients.
//   unscale  multiplies them by inv_scale and flags values that are not finite then.
//   clip     returns the norm, unscales gradients and clips them to max_norm.
//
// Returns ({device: flag}, norm or None). If a gradient is a Python tensor subclass, it returns
// None and writes nothing: torch handles the gradients. `flags` has flags by device. With
// `is_unscaled`, gradients are not multiplied by inv_scale. With `written`, the optimizer will
// write the gradients that a pass only reads. `reduce` is as for reduced().
py::object grad_pass(py::handle param_groups, const std::string& kind, py::handle inv_scale,
                     const py::dict& flags, bool is_unscaled, std::optional<double> max_norm,
                     bool error_if_nonfinite, bool allow_fp16, bool written, py::handle reduce) {
  HANDLE_TH_ERRORS
  const at::NoGradGuard no_grad;
  const bool has_norm = kind == "norm" || kind == "clip";
  const bool writes = kind == "unscale" || kind == "clip";
  TORCH_INTERNAL_ASSERT(has_norm || writes || kind == "check");
  check_max_norm("amp_ext::unscale_", max_norm, /*norm_given=*/true);
  const char* const op = has_norm ? "amp_ext::grad_norm"
                         : writes ? "amp_ext::unscale_"
                                  : "amp_ext::check_finite";
  OptimizerGrads grads({.op = op,
                        .access = writes || written ? Access::write : Access::read,
                        .allow_fp16 = allow_fp16 || is_unscaled || !writes,
                        .has_norm = has_norm,
                        .across = !reduce.is_none()},
                       param_groups);
  if (!grads.collect()) return py::none();
  const at::Tensor& factor = tensor_of("inv_scale", inv_scale);
  Arguments arguments(op, factor.device());
  arguments.read<float>("inv_scale", factor);
  for (GradList& list : grads.lists()) arguments.check_apart(&list);
  std::vector<Scalars> scalars = scalars_of(op, grads.lists(), flags, error_if_nonfinite);

  std::vector<GradList>& lists = grads.lists();
  py::dict found_infs;
  // Launches leave the GIL to others, as torch's ops do. Destroyed before all Python objects.
  std::optional<py::gil_scoped_release> released;
  if (!has_norm) grads.install_coalesced();
  released.emplace();
  for (Scalars& each : scalars) each.inv_scale = copy_to(factor, each.found_inf.device());
  std::vector<at::Tensor> norms;
  for (size_t i = 0; i < lists.size(); ++i) {
    const auto& [by, flag] = scalars[i];
    const auto* const by_data = by.const_data_ptr<float>();
    if (has_norm) {
      auto* const norm = norms.emplace_back(at::empty({}, by.options())).mutable_data_ptr<float>();
      launch(lists[i], flag, &Backend::grad_norm,
             GradNormArgs{.inv_scale = is_unscaled ? nullptr : by_data, .norm = norm});
    } else if (writes) {
      launch(lists[i], flag, &Backend::unscale, UnscaleArgs{.inv_scale = by_data});
      lists[i].finish_writes();
    } else {
      launch(lists[i], flag, &Backend::check_finite, CheckFiniteArgs{});
    }
  }
  released.reset();
  if (writes && !has_norm) grads.mark_dtensors_written();

  for (const Scalars& each : scalars)
    found_infs[device_object(each.found_inf.device())] = object_of(each.found_inf);
  const OptionalTensor reduced_norm =
      reduced(reduce, grads, found_infs, has_norm ? &norms : nullptr);
  if (!has_norm) return py::make_tuple(found_infs, py::none());

  released.emplace();
  const at::Tensor norm = reduced_norm ? *reduced_norm : total_norm(norms, factor.device());
  if (norms.size() > 1 && !reduced_norm) {  // each may be finite without the total
    at::Tensor flag = scalars[0].found_inf;
    flag.masked_fill_(copy_to(norm, flag.device()).isfinite().logical_not(), 1);
  }
  TORCH_CHECK(!error_if_nonfinite || std::isfinite(norm.item<float>()),
              "The total norm of order 2.0 for gradients from `optimizer` is non-finite, so it "
              "cannot be clipped. To disable this error and let step() skip the optimizer's step "
              "instead, set `error_if_nonfinite=False`");
  released.reset();
  grads.install_coalesced();
  released.emplace();
  if (writes) {
    for (size_t i = 0; i < lists.size(); ++i) {
      const at::Device device = lists[i].device();
      const at::Tensor by = is_unscaled ? filled_on(device, 1) : scalars[i].inv_scale;
      const at::Tensor norm_here = copy_to(norm, device);
      launch(lists[i], scalars[i].found_inf, &Backend::unscale,
             UnscaleArgs{.inv_scale = by.const_data_ptr<float>(),
                         .norm = norm_here.const_data_ptr<float>(),
                         .max_norm = static_cast<float>(max_norm.value_or(INFINITY))});
      lists[i].finish_writes();
    }
  }
  released.reset();
  if (writes) grads.mark_dtensors_written();
  return py::make_tuple(found_infs, object_of(norm));
  END_HANDLE_TH_ERRORS_PYBIND
}

}  // namespace

void bind_scaler(py::module_& m) {
  m.def("grad_pass", &grad_pass, py::arg("param_groups"), py::arg("kind"), py::arg("inv_scale"),
        py::arg("flags"), py::arg("is_unscaled") = false, py::arg("max_norm") = py::none(),
        py::arg("error_if_nonfinite") = false, py::arg("allow_fp16") = false,
        py::arg("written") = true, py::arg("reduce") = py::none());
}

}  // namespace amp_ext
