// The scaler's paths from an optimizer's param_groups to the ops, without a loop in Python.
#include "scaler/scaler.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <pybind11/stl.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "backends/backends.h"
#include "checks/python.h"
#include "lists/lists.h"
#include "scaler/optimizer_grads.h"

namespace py = pybind11;

namespace amp_ext {
namespace {

at::Tensor copy_to(const at::Tensor& tensor, at::Device device, bool copy) {
  if (!copy && tensor.device() == device) return tensor;
  // A copy to the CPU must have arrived: kernels there read it at once.
  return tensor.to(tensor.options().device(device), /*non_blocking=*/!device.is_cpu(), copy);
}

py::object device_object(at::Device device) {
  auto object = py::reinterpret_steal<py::object>(THPDevice_New(device));
  if (!object) throw py::error_already_set();
  return object;
}

std::optional<at::Tensor> optional_tensor(const char* name, py::handle object) {
  if (object.is_none()) return std::nullopt;
  return tensor_of(name, object);
}

// Elements from which on a pass is long enough on a CPU to let other Python threads run.
constexpr int64_t kLongPass = 1 << 20;

bool runs_python(Family op, at::Device device) {
  const Backend& backend = choose("amp_ext", device);
  return &backend == &triton_backend() || !is_known(backend, op, device);
}

// Releases the GIL during a pass that is long, that waits for a device (another thread may have to
// launch what it waits for), or that runs Python code (which may release the GIL anyway), and keeps
// the tensors alive meanwhile.
class GilFreePass {
 public:
  GilFreePass(OptimizerGrads& grads, bool waits, const std::vector<Family>& ops) {
    bool is_quick = !waits && grads.cpu_numel() < kLongPass;
    for (const GradList& list : grads.lists())
      for (const Family op : ops) is_quick &= !runs_python(op, list.device());
    if (is_quick) return;
    grads.keep_alive();
    release_.emplace();
  }

 private:
  std::optional<py::gil_scoped_release> release_;
};

// The factor and the found_inf of a list, on its device.
struct Scalars {
  at::Tensor inv_scale;
  at::Tensor found_inf;
};

at::Tensor filled_on(at::Device device, float value) {
  return at::full({}, value, at::TensorOptions(at::kFloat).device(device));
}

at::Tensor zero_on(at::Device device) { return filled_on(device, 0); }

// Of each list: inv_scale on its device, if defined, and `found_inf_on` of the device.
template <class FoundInfOn>
std::vector<Scalars> scalars_of(const OptimizerGrads& grads, const at::Tensor& inv_scale,
                                const FoundInfOn& found_inf_on) {
  std::vector<Scalars> result;
  for (const GradList& list : grads.lists()) {
    const auto before = std::ranges::find_if(
        result, [&](const Scalars& each) { return each.found_inf.device() == list.device(); });
    if (before != result.end()) {
      result.push_back(*before);
      continue;
    }
    result.push_back({inv_scale.defined() ? copy_to(inv_scale, list.device(), false) : inv_scale,
                      found_inf_on(list.device())});
  }
  return result;
}

// The given found_inf, which is 0, on its device, and new ones on others.
auto free_or_new(const std::optional<at::Tensor>& free) {
  return [&free](at::Device device) {
    return free && free->device() == device ? *free : zero_on(device);
  };
}

py::dict found_infs_of(const std::vector<Scalars>& scalars) {
  py::dict result;
  for (const Scalars& each : scalars)
    result[device_object(each.found_inf.device())] = object_of(each.found_inf);
  return result;
}

// Makes found_infs and norms those of all processes. `reduce` is a Reduction of
// amp_ext.scaler.processes, or None where there is one process. Returns the total norm if `norms`
// of the lists are given and other processes have a part in it.
std::optional<at::Tensor> reduced(py::handle reduce, const OptimizerGrads& grads,
                                  py::dict& found_infs,
                                  const std::optional<std::vector<at::Tensor>>& norms) {
  if (reduce.is_none()) return std::nullopt;
  py::object by_spread = py::none();
  if (norms) {
    std::vector<std::vector<at::Tensor>> lists(grads.spreads().size());
    for (size_t i = 0; i < norms->size(); ++i) lists[grads.spread_index(i)].push_back((*norms)[i]);
    by_spread = py::cast(lists);
  }
  return optional_tensor("norm", reduce(found_infs, py::cast(grads.spreads()), by_spread));
}

void unscale_all(OptimizerGrads& grads, const std::vector<Scalars>& scalars) {
  for (size_t i = 0; i < scalars.size(); ++i) {
    unscale_(grads.lists()[i], scalars[i].found_inf, scalars[i].inv_scale, std::nullopt,
             std::nullopt, Others::fresh);
  }
  grads.mark_dtensors_written();
}

// {device: found_inf on it} for the gradients of `param_groups`, which are multiplied by inv_scale.
// `found_inf`, 0 or None, is that of its device. `reduce` is as for reduced(). None when a gradient
// is a Python tensor subclass that is left to torch; then nothing has been written.
py::object unscale_grads(py::handle param_groups, py::handle inv_scale, py::handle found_inf,
                         bool allow_fp16, py::handle reduce) {
  HANDLE_TH_ERRORS
  const at::NoGradGuard no_grad;
  OptimizerGrads grads({.op = "amp_ext::unscale_",
                        .access = Access::write,
                        .allow_fp16 = allow_fp16,
                        .coalesce = Coalesce::fp16,
                        .across = !reduce.is_none()});
  if (!grads.collect(param_groups)) return py::none();
  const at::Tensor& factor = tensor_of("inv_scale", inv_scale);
  const std::optional<at::Tensor> free = optional_tensor("found_inf", found_inf);
  grads.close();
  grads.install_coalesced();

  std::vector<Scalars> scalars;
  {
    const GilFreePass pass(grads, !grads.are_all_on(factor.device()), {Family::unscale});
    scalars = scalars_of(grads, factor, free_or_new(free));
    unscale_all(grads, scalars);
  }
  py::dict found_infs = found_infs_of(scalars);
  reduced(reduce, grads, found_infs, std::nullopt);
  return found_infs;
  END_HANDLE_TH_ERRORS_PYBIND
}

// As unscale_grads, but each found_inf starts as a copy of the given one.
py::object unscale_grads_by(py::handle param_groups, py::handle inv_scale, py::handle found_inf,
                            bool allow_fp16, py::handle reduce) {
  HANDLE_TH_ERRORS
  constexpr auto op = "amp_ext::unscale_";
  const at::NoGradGuard no_grad;
  OptimizerGrads grads({.op = op,
                        .access = Access::write,
                        .allow_fp16 = allow_fp16,
                        .coalesce = Coalesce::fp16,
                        .across = !reduce.is_none()});
  if (!grads.collect(param_groups)) return py::none();
  const at::Tensor& factor = tensor_of("inv_scale", inv_scale);
  const at::Tensor& initial = tensor_of("found_inf", found_inf);
  Arguments given(op, factor.device());
  given.read<float>("inv_scale", factor);
  one_element<float>(op, "found_inf", initial, initial.device());
  grads.close();
  for (const GradList& list : grads.lists()) given.check_apart_from(list);
  grads.install_coalesced();

  std::vector<Scalars> scalars;
  {
    const GilFreePass pass(grads, !grads.are_all_on(factor.device()), {Family::unscale});
    scalars = scalars_of(
        grads, factor, [&](at::Device device) { return copy_to(initial, device, /*copy=*/true); });
    unscale_all(grads, scalars);
  }
  py::dict found_infs = found_infs_of(scalars);
  reduced(reduce, grads, found_infs, std::nullopt);
  return found_infs;
  END_HANDLE_TH_ERRORS_PYBIND
}

// As unscale_grads, but the gradients are only read. With `written` they are those that an
// optimizer will write.
py::object check_grads(py::handle param_groups, py::handle found_inf, bool written,
                       py::handle reduce) {
  HANDLE_TH_ERRORS
  const at::NoGradGuard no_grad;
  OptimizerGrads grads({.op = "amp_ext::check_finite",
                        .access = written ? Access::write : Access::read,
                        .allow_fp16 = true,
                        .coalesce = Coalesce::fp16,
                        .across = !reduce.is_none()});
  if (!grads.collect(param_groups)) return py::none();
  const std::optional<at::Tensor> free = optional_tensor("found_inf", found_inf);
  grads.close();
  grads.install_coalesced();

  const std::vector<Scalars> scalars = scalars_of(grads, {}, free_or_new(free));
  {
    const GilFreePass pass(grads, /*waits=*/false, {Family::check_finite});
    for (size_t i = 0; i < scalars.size(); ++i) {
      check_finite(grads.lists()[i], scalars[i].found_inf, Others::fresh);
    }
  }
  py::dict found_infs = found_infs_of(scalars);
  reduced(reduce, grads, found_infs, std::nullopt);
  return found_infs;
  END_HANDLE_TH_ERRORS_PYBIND
}

// The norm of all lists from the norms of each.
at::Tensor total_norm(const std::vector<at::Tensor>& norms, at::Device device) {
  if (norms.empty()) return zero_on(device);
  if (norms.size() == 1) return copy_to(norms[0], device, /*copy=*/false);
  std::vector<at::Tensor> here;
  for (const at::Tensor& norm : norms) here.push_back(copy_to(norm, device, /*copy=*/false));
  // In fp64, where no square overflows.
  return at::linalg_vector_norm(at::stack(here), 2, std::nullopt, false, at::kDouble)
      .to(at::kFloat);
}

// ({device: found_inf on it}, norm) for the gradients of `param_groups`, which are multiplied by
// inv_scale and clipped to max_norm, or only read where max_norm is None. `found_infs` is None, or
// a dict like the result where they are unscaled already. `found_inf` and `reduce` are as for
// unscale_grads, `written` as for check_grads. None when a gradient is a Python tensor subclass
// that is left to torch; then nothing has been written.
py::object clip_grads(py::handle param_groups, py::handle inv_scale, py::handle found_inf,
                      const std::optional<py::dict>& found_infs, std::optional<double> max_norm,
                      bool error_if_nonfinite, bool allow_fp16, bool written, py::handle reduce) {
  HANDLE_TH_ERRORS
  const at::NoGradGuard no_grad;
  OptimizerGrads grads({.op = "amp_ext::grad_norm",
                        .access = written || max_norm ? Access::write : Access::read,
                        .allow_fp16 = allow_fp16,
                        .coalesce = Coalesce::all,
                        .lists = Lists::by_spread,
                        .across = !reduce.is_none()});
  if (!grads.collect(param_groups)) return py::none();
  const at::Tensor& factor = tensor_of("inv_scale", inv_scale);
  const std::optional<at::Tensor> free = optional_tensor("found_inf", found_inf);
  std::vector<GradList>& lists = grads.lists();
  std::vector<Scalars> scalars;
  if (found_infs) {
    scalars = scalars_of(grads, {}, [&](at::Device device) {
      const py::object key = device_object(device);
      const at::Tensor before =
          found_infs->contains(key) ? tensor_of("found_inf", (*found_infs)[key]) : zero_on(device);
      return error_if_nonfinite ? before.clone() : before;  // an error leaves it as it is
    });
  }
  grads.close();

  const bool waits = error_if_nonfinite || !grads.are_all_on(factor.device());
  std::vector<at::Tensor> norms;
  {
    const GilFreePass pass(grads, waits, {Family::grad_norm});
    if (!found_infs) scalars = scalars_of(grads, factor, free_or_new(free));
    for (size_t i = 0; i < lists.size(); ++i) {
      const std::optional<at::Tensor> by =
          found_infs ? std::nullopt : std::optional(scalars[i].inv_scale);
      norms.push_back(grad_norm(lists[i], scalars[i].found_inf, by, std::nullopt, Others::fresh));
    }
  }
  py::dict found = found_infs_of(scalars);
  const std::optional<at::Tensor> of_all = reduced(reduce, grads, found, norms);
  const at::Tensor norm = of_all ? *of_all : total_norm(norms, factor.device());
  {
    const GilFreePass pass(grads, waits,
                           max_norm ? std::vector{Family::unscale} : std::vector<Family>());
    if (norms.size() > 1 && !of_all) {  // each is finite, perhaps, but not the total
      at::Tensor& found_here = scalars[0].found_inf;
      found_here.masked_fill_(copy_to(norm, found_here.device(), false).isfinite().logical_not(),
                              1);
    }
    TORCH_CHECK(!error_if_nonfinite || std::isfinite(norm.item<float>()),
                "The total norm of order 2.0 for gradients from `optimizer` is non-finite, so it "
                "cannot be clipped. To disable this error and let step() skip the optimizer's step "
                "instead, set `error_if_nonfinite=False`");
    grads.install_coalesced();
    if (max_norm) {
      for (size_t i = 0; i < lists.size(); ++i) {
        const at::Tensor here = copy_to(norm, lists[i].device(), /*copy=*/false);
        const at::Tensor by = found_infs ? filled_on(lists[i].device(), 1) : scalars[i].inv_scale;
        unscale_(lists[i], scalars[i].found_inf, by, here, max_norm, Others::fresh);
      }
      grads.mark_dtensors_written();
    }
  }
  return py::make_tuple(found, object_of(norm));
  END_HANDLE_TH_ERRORS_PYBIND
}

// update_scale_ without the dispatcher: the scaler calls it in every step. found_infs are moved to
// the scale's device first.
void update_scale(py::handle scale, py::handle growth_tracker, const py::list& found_infs,
                  double growth_factor, double backoff_factor, int64_t growth_interval,
                  std::optional<double> min_scale, std::optional<double> max_scale,
                  int64_t hysteresis, py::handle hysteresis_tracker, py::handle skipped_steps,
                  py::handle next_step) {
  HANDLE_TH_ERRORS
  const at::NoGradGuard no_grad;
  at::Tensor scale_tensor = tensor_of("scale", scale);
  at::Tensor tracker_tensor = tensor_of("growth_tracker", growth_tracker);
  std::vector<at::Tensor> found;
  for (const py::handle found_inf : found_infs) {
    found.push_back(copy_to(tensor_of("found_inf", found_inf), scale_tensor.device(), false));
  }
  const ScaleOptions options{growth_factor,
                             backoff_factor,
                             growth_interval,
                             min_scale,
                             max_scale,
                             hysteresis,
                             optional_tensor("hysteresis_tracker", hysteresis_tracker),
                             optional_tensor("skipped_steps", skipped_steps),
                             optional_tensor("next_step", next_step)};
  std::optional<py::gil_scoped_release> release;
  if (runs_python(Family::update_scale, scale_tensor.device()))
    release.emplace();  // it may have to wait for memory
  update_scale_(scale_tensor, tracker_tensor, found, options);
  END_HANDLE_TH_ERRORS_PYBIND
}

}  // namespace

void bind_scaler(py::module_& m) {
  m.def("unscale_grads", &unscale_grads);
  m.def("unscale_grads_by", &unscale_grads_by);
  m.def("check_grads", &check_grads);
  m.def("clip_grads", &clip_grads);
  m.def("update_scale", &update_scale);
}

}  // namespace amp_ext
