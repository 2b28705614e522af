// amp_ext._C: the host paths of the scaler and of short casts, and the switches of routing.
// Everything else is an op of library.cpp.
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_values.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "autocast.h"
#include "backend.h"
#include "ops.h"
#include "regions.h"

namespace py = pybind11;

namespace amp_ext {
namespace {

// The gradients of one optimizer, by device in order of first appearance.
class OptimizerGrads {
 public:
  OptimizerGrads(Access access, bool allow_fp16) : access_(access), allow_fp16_(allow_fp16) {}

  // Reads `.grad` of every parameter. False when only Python can serve: a gradient is a Python
  // tensor subclass, or a parameter's class has a `grad` of its own.
  bool collect(py::handle param_groups);

  // To be called before anything is written: raises what remains to be raised, then installs the
  // coalesced gradients.
  void close();

  std::vector<GradList>& lists() { return lists_; }

  int64_t numel() const {
    int64_t total = 0;
    for (const GradList& list : lists_) total += list.numel();
    return total;
  }

  // The gradients, so that they live on while the GIL is released.
  std::vector<at::Tensor> owners() const {
    std::vector<at::Tensor> result;
    for (const at::Tensor* grad : grads_) result.push_back(*grad);
    return result;
  }

 private:
  bool find_params(py::handle params);
  void find_grads();
  bool add(at::TensorImpl* param, const at::Tensor& grad);
  GradList& list_for(at::Device device);

  Access access_;
  bool allow_fp16_;
  std::vector<py::object> sequences_;    // keep the parameters alive
  std::vector<at::TensorImpl*> params_;  // those that have a gradient
  std::vector<const at::Tensor*> grads_;
  std::vector<at::TensorImpl*> grad_impls_;
  std::vector<GradList> lists_;
  std::vector<at::Tensor> sparse_values_;                          // kept alive for lists_
  std::vector<std::pair<at::TensorImpl*, at::Tensor>> coalesced_;  // parameter, its new gradient
};

// The way from a parameter to its gradient's memory is a chain of cache misses. They overlap
// between parameters, and the walk takes half the time, when each loop follows a link or two and
// asks for them some parameters ahead of their use.
bool OptimizerGrads::collect(py::handle param_groups) {
  for (const py::handle group : param_groups) {
    if (!find_params(group[py::str("params")])) return false;
  }
  find_grads();
  const size_t n = grads_.size();
  for (size_t i = 0; i < n; ++i) {
    if (i + 2 * kAhead < n) prefetch_tensor(grad_impls_[i + 2 * kAhead]);
    if (i + kAhead < n) prefetch_links(grad_impls_[i + kAhead]);
    if (!add(params_[i], *grads_[i])) return false;
  }
  return true;
}

bool has_tensors_grad(PyObject* tensor) {
  if (THPVariable_CheckExact(tensor)) return true;
  return py::type::handle_of(tensor).attr("grad").is(py::handle(THPVariableClass).attr("grad"));
}

bool OptimizerGrads::find_params(py::handle params) {
  PyObject* const sequence = PySequence_Fast(params.ptr(), "params must be iterable");
  if (!sequence) throw py::error_already_set();
  sequences_.push_back(py::reinterpret_steal<py::object>(sequence));
  PyObject** const objects = PySequence_Fast_ITEMS(sequence);
  const auto n = static_cast<size_t>(PySequence_Fast_GET_SIZE(sequence));
  params_.reserve(params_.size() + n);
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) __builtin_prefetch(objects[i + kAhead]);
    if (!THPVariable_Check(objects[i])) {
      const py::str name = py::type::handle_of(objects[i]).attr("__name__");
      PyErr_Format(PyExc_AssertionError, "expected param to be torch.Tensor, got %U", name.ptr());
      throw py::error_already_set();
    }
    if (!has_tensors_grad(objects[i])) return false;
    params_.push_back(THPVariable_Unpack(objects[i]).unsafeGetTensorImpl());
  }
  return true;
}

void OptimizerGrads::find_grads() {
  const size_t n = params_.size();
  size_t found = 0;
  grads_.reserve(n);
  grad_impls_.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    if (i + 2 * kAhead < n) __builtin_prefetch(params_[i + 2 * kAhead]);
    if (i + kAhead < n) __builtin_prefetch(params_[i + kAhead]->autograd_meta());
    const at::Tensor& grad = params_[i]->grad();
    if (!grad.defined()) continue;
    grads_.push_back(&grad);
    grad_impls_.push_back(grad.unsafeGetTensorImpl());
    params_[found++] = params_[i];
  }
  params_.resize(found);
}

bool OptimizerGrads::add(at::TensorImpl* param, const at::Tensor& grad) {
  if (grad.unsafeGetTensorImpl()->is_python_dispatch()) return false;
  const bool half = grad.scalar_type() == at::kHalf;
  TORCH_CHECK_VALUE(allow_fp16_ || !half, "Attempting to unscale FP16 gradients.");
  if (grad.layout() != at::kSparse) {
    list_for(grad.device()).add(grad);
    return true;
  }
  // An uncoalesced fp16 gradient may overflow only once its duplicates are added up.
  const at::Tensor sparse = half ? grad.coalesce() : grad;
  if (half) coalesced_.emplace_back(param, sparse);
  list_for(sparse.device()).add(sparse_values_.emplace_back(sparse._values()));
  return true;
}

GradList& OptimizerGrads::list_for(at::Device device) {
  for (GradList& list : lists_) {
    if (list.device() == device) return list;
  }
  lists_.emplace_back(access_ == Access::write ? "amp_ext::unscale_" : "amp_ext::check_finite",
                      access_, device);
  lists_.back().reserve(grads_.size());
  return lists_.back();
}

void OptimizerGrads::close() {
  for (GradList& list : lists_) {
    list.close();
    backend_for(list.op(), list.device());
  }
  for (auto& [param, grad] : coalesced_) param->mutable_grad() = grad;
}

at::Tensor copy_to(const at::Tensor& tensor, at::Device device, bool copy) {
  // A copy to the CPU must have arrived: kernels there read it at once.
  return tensor.to(tensor.options().device(device), /*non_blocking=*/!device.is_cpu(), copy);
}

py::object device_object(at::Device device) {
  auto object = py::reinterpret_steal<py::object>(THPDevice_New(device));
  if (!object) throw py::error_already_set();
  return object;
}

const at::Tensor& tensor_of(const char* name, py::handle object) {
  TORCH_CHECK_TYPE(THPVariable_Check(object.ptr()), "amp_ext: ", name, " must be a tensor, got ",
                   Py_TYPE(object.ptr())->tp_name);
  return THPVariable_Unpack(object.ptr());
}

std::optional<at::Tensor> optional_tensor(const char* name, py::handle object) {
  if (object.is_none()) return std::nullopt;
  return tensor_of(name, object);
}

// Elements from which on a pass is long enough on a CPU to let other Python threads run.
constexpr int64_t kLongPass = 1 << 20;

// {device: found_inf on it} for the gradients of `param_groups`, which are multiplied by inv_scale,
// or by 1 / scale, or only checked where both are None. found_inf is a tensor to copy, or None for
// 0 on the scale's device. None when a gradient is a Python tensor subclass; then nothing has been
// touched.
py::object unscale_grads(py::handle param_groups, py::handle scale, py::handle inv_scale,
                         py::handle found_inf, bool allow_fp16) {
  HANDLE_TH_ERRORS
  const at::NoGradGuard no_grad;
  const bool write = !scale.is_none() || !inv_scale.is_none();
  OptimizerGrads grads(write ? Access::write : Access::read, allow_fp16);
  if (!grads.collect(param_groups)) return py::none();
  // Correctly rounded, and so bitwise what torch gets by dividing in fp64 and rounding.
  const at::Tensor factor = scale.is_none()
                                ? optional_tensor("inv_scale", inv_scale).value_or(at::Tensor())
                                : tensor_of("scale", scale).reciprocal();
  const bool given = !found_inf.is_none();
  const at::Tensor none_found =
      given ? tensor_of("found_inf", found_inf) : at::zeros({}, factor.options());
  constexpr auto op = "amp_ext::unscale_";
  if (write) one_element<float>(op, "inv_scale", factor, factor.device());
  one_element<float>(op, "found_inf", none_found, none_found.device());
  grads.close();

  const bool copy = given || grads.lists().size() > 1;
  std::vector<at::Tensor> found;
  {
    std::vector<at::Tensor> owners;
    std::optional<py::gil_scoped_release> release;
    if (grads.numel() >= kLongPass) {
      owners = grads.owners();
      release.emplace();
    }
    for (GradList& list : grads.lists()) {
      found.push_back(copy_to(none_found, list.device(), copy));
      if (write) {
        unscale_(list, found.back(), copy_to(factor, list.device(), /*copy=*/false));
      } else {
        check_finite(list, found.back(), std::nullopt);
      }
    }
  }
  py::dict found_inf_per_device;
  for (const at::Tensor& tensor : found) {
    found_inf_per_device[device_object(tensor.device())] =
        py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
  }
  return found_inf_per_device;
  END_HANDLE_TH_ERRORS_PYBIND
}

// update_scale_ without the dispatcher: the scaler calls it in every step. found_infs are moved to
// the scale's device first.
void update_scale(py::handle scale, py::handle growth_tracker, const py::list& found_infs,
                  double growth_factor, double backoff_factor, int64_t growth_interval,
                  std::optional<double> min_scale, std::optional<double> max_scale,
                  int64_t hysteresis, py::handle hysteresis_tracker, py::handle skipped_steps) {
  HANDLE_TH_ERRORS
  const at::NoGradGuard no_grad;
  at::Tensor scale_tensor = tensor_of("scale", scale);
  at::Tensor tracker_tensor = tensor_of("growth_tracker", growth_tracker);
  std::vector<at::Tensor> found;
  for (const py::handle found_inf : found_infs) {
    found.push_back(copy_to(tensor_of("found_inf", found_inf), scale_tensor.device(), false));
  }
  update_scale_(scale_tensor, tracker_tensor, found, growth_factor, backoff_factor, growth_interval,
                min_scale, max_scale, hysteresis,
                optional_tensor("hysteresis_tracker", hysteresis_tracker),
                optional_tensor("skipped_steps", skipped_steps));
  END_HANDLE_TH_ERRORS_PYBIND
}

using PyTensors = std::vector<const at::Tensor*>;

// The tensors of a Python list; nothing if it is another sequence or holds anything but tensors.
std::optional<PyTensors> plain_tensors(py::handle list) {
  if (!PyList_CheckExact(list.ptr())) return std::nullopt;
  const auto n = static_cast<size_t>(PyList_GET_SIZE(list.ptr()));
  PyTensors tensors;
  tensors.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) __builtin_prefetch(PyList_GET_ITEM(list.ptr(), i + kAhead));
    PyObject* const object = PyList_GET_ITEM(list.ptr(), i);
    if (!THPVariable_CheckExact(object)) return std::nullopt;
    tensors.push_back(&THPVariable_Unpack(object));
  }
  return tensors;
}

// Whether the dispatcher would go to the CPU's or CUDA's kernel, with nothing that looks on but
// autograd and autocast. Counts the tensors' elements.
bool needs_no_dispatcher(const PyTensors& tensors, int64_t* numel) {
  const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
  c10::DispatchKeySet keys = local.included_;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (i + kAhead < tensors.size()) prefetch_tensor(tensors[i + kAhead]->unsafeGetTensorImpl());
    keys = keys | tensors[i]->key_set();
    *numel += tensors[i]->numel();
  }
  keys = keys - local.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView -
         c10::autocast_dispatch_keyset - c10::DispatchKeySet(c10::DispatchKey::BackendSelect);
  const c10::DispatchKey first = keys.highestPriorityTypeId();
  return (first == c10::DispatchKey::CPU || first == c10::DispatchKey::CUDA) &&
         !at::impl::torch_function_mode_enabled() && !at::hasCallbacks();
}

// cast_ on lists for which the way through the dispatcher costs more than the cast. False when only
// the dispatcher can serve, or when other Python threads should run meanwhile; then nothing has
// been touched.
bool cast_directly(py::handle outputs, py::handle inputs) {
  HANDLE_TH_ERRORS
  const auto to = plain_tensors(outputs), from = plain_tensors(inputs);
  int64_t numel = 0;
  if (!to || !from || !needs_no_dispatcher(*to, &numel) || !needs_no_dispatcher(*from, &numel) ||
      numel >= kLongPass)
    return false;
  cast_(*to, *from);
  return true;
  END_HANDLE_TH_ERRORS_PYBIND
}

}  // namespace

bool is_traced(const at::Tensor& tensor) {
  const py::gil_scoped_acquire gil;
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
  const std::string_view name = Py_TYPE(object.ptr())->tp_name;
  return name == "FakeTensor" || name == "FunctionalTensor";
}

}  // namespace amp_ext

PYBIND11_MODULE(_C, m) {
  m.def("cuda_built", &amp_ext::cuda_built, "Whether CUDA kernels were built.");
  m.def("multiplies_bf16", &amp_ext::cpu::multiplies_bf16,
        "Whether this processor has instructions for products of bfloat16.");
  m.attr("REGION_MARK") = c10::DeviceTypeName(amp_ext::kRegionMark, /*lower_case=*/true);
  m.def("enter_region", &amp_ext::enter_region);
  m.def("exit_region", &amp_ext::exit_region);
  m.def("install", &amp_ext::install);
  m.def("uninstall", &amp_ext::uninstall);
  m.def("is_installed", &amp_ext::is_installed);
  m.def("unscale_grads", &amp_ext::unscale_grads, py::arg("param_groups"), py::arg("scale"),
        py::arg("inv_scale"), py::arg("found_inf"), py::arg("allow_fp16"));
  m.def("cast_directly", &amp_ext::cast_directly);
  m.def("update_scale", &amp_ext::update_scale, py::arg("scale"), py::arg("growth_tracker"),
        py::arg("found_infs"), py::arg("growth_factor"), py::arg("backoff_factor"),
        py::arg("growth_interval"), py::arg("min_scale"), py::arg("max_scale"),
        py::arg("hysteresis"), py::arg("hysteresis_tracker"), py::arg("skipped_steps"));
}
