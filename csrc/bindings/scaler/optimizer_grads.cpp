#include "scaler/optimizer_grads.h"

#include <ATen/ops/_values.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/python_variable.h>

#include "backends/backends.h"
#include "checks/dtensor.h"
#include "checks/python.h"
#include "params/plain.h"

namespace py = pybind11;

namespace amp_ext {
namespace {

bool has_tensors_grad(PyObject* tensor) {
  if (THPVariable_CheckExact(tensor)) return true;
  return py::type::handle_of(tensor).attr("grad").is(py::handle(THPVariableClass).attr("grad"));
}

// Returns whether torch.distributed.fsdp has flattened a parameter. Each process has a part of it,
// perhaps an empty one.
bool is_flattened(PyObject* param) {
  static const py::handle name = PyUnicode_InternFromString("_fsdp_flattened");
  return py::hasattr(param, name);
}

}  // namespace

bool OptimizerGrads::collect() {
  for (PyObject* const object : params_.all()) {
    if (THPVariable_Check(object)) continue;
    PyErr_Format(PyExc_AssertionError, "expected param to be torch.Tensor, got %s",
                 Py_TYPE(object)->tp_name);
    throw py::error_already_set();
  }
  for (PyObject* const object : params_.all()) {
    if (!add_param(object)) return false;
  }
  return true;
}

bool OptimizerGrads::add_param(PyObject* object) {
  const bool may_be_dtensor = use_.across && is_dtensor(object);
  if (!may_be_dtensor && !has_tensors_grad(object)) return false;
  size_t sharding = 0;
  if (use_.across) {
    const std::optional<size_t> found = find_sharding(object);
    if (!found) return false;
    sharding = *found;
  }
  const at::Tensor* param = &THPVariable_Unpack(object);
  const at::Tensor* grad = &param->unsafeGetTensorImpl()->grad();
  if (!grad->defined()) return true;
  if (may_be_dtensor) {
    if (!redistribute_grad(object)) return false;
    const at::Tensor& whole = dtensors_.emplace_back(param->unsafeGetTensorImpl()->grad());
    PyObject* const local_grad = local_of(object_of(whole).ptr());
    PyObject* const local_param = local_of(object);
    if (!is_plain(local_grad) || !is_plain(local_param)) return false;
    grad = &THPVariable_Unpack(local_grad);
    if (grad->layout() != at::kStrided) return false;
    param = &kept_.emplace_back(THPVariable_Unpack(local_param));
  }
  return add(*param, kept_.emplace_back(*grad), sharding);
}

// Returns none for a DTensor that is a sum over processes.
std::optional<size_t> OptimizerGrads::find_sharding(PyObject* param) {
  static const py::handle fsdp = PyUnicode_InternFromString("fsdp");
  py::object key = py::none();
  std::optional<Sharding> sharding;
  if (is_dtensor(param)) {
    sharding = sharding_of(param);
    key = py::make_tuple(sharding->mesh, sharding->placements);
  } else if (is_flattened(param)) {
    key = py::reinterpret_borrow<py::object>(fsdp);
  }
  for (size_t i = 0; i < shardings_.size(); ++i) {
    if (shardings_[i].is(key) || shardings_[i].equal(key)) return i;
  }
  if (sharding && sharding->has_partial()) return std::nullopt;
  shardings_.push_back(std::move(key));
  return shardings_.size() - 1;
}

bool OptimizerGrads::add(const at::Tensor& param, const at::Tensor& grad, size_t sharding) {
  if (grad.unsafeGetTensorImpl()->is_python_dispatch()) return false;
  const bool is_half = grad.scalar_type() == at::kHalf;
  TORCH_CHECK_VALUE(
      use_.allow_fp16 || !is_half,
      "Attempting to unscale FP16 gradients. Either train FP32 weights under autocast, "
      "or FP16 weights by an optimizer of amp_ext.optim with master_weights=True, or "
      "construct the scaler with allow_fp16_grads=True");
  if (grad.layout() != at::kSparse) {
    list_for(grad.device(), sharding).add(grad);
    return true;
  }
  // An uncoalesced fp16 gradient may overflow only once its duplicates are added up.
  const bool coalesces = is_half || use_.has_norm;
  const at::Tensor sparse = coalesces ? grad.coalesce() : grad;
  if (coalesces) coalesced_.emplace_back(param.unsafeGetTensorImpl(), sparse);
  list_for(sparse.device(), sharding).add(sparse_values_.emplace_back(sparse._values()));
  return true;
}

GradList& OptimizerGrads::list_for(at::Device device, size_t sharding) {
  if (!use_.has_norm) sharding = 0;
  for (size_t i = 0; i < lists_.size(); ++i) {
    if (lists_[i].device() == device && sharding_of_list_[i] == sharding) return lists_[i];
  }
  choose(use_.op, device);  // throws where there is none
  sharding_of_list_.push_back(sharding);
  lists_.emplace_back(use_.op, use_.access, device);
  lists_.back().reserve(params_.all().size());
  return lists_.back();
}

void OptimizerGrads::install_coalesced() {
  for (auto& [param, grad] : coalesced_) param->mutable_grad() = grad;
}

}  // namespace amp_ext
