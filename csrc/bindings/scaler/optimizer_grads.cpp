#include "scaler/optimizer_grads.h"

#include <ATen/ops/_values.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/python_variable.h>

#include "backends/backends.h"
#include "optim/served.h"

namespace py = pybind11;

namespace amp_ext {
namespace {

bool has_tensors_grad(PyObject* tensor) {
  if (THPVariable_CheckExact(tensor)) return true;
  return py::type::handle_of(tensor).attr("grad").is(py::handle(THPVariableClass).attr("grad"));
}

}  // namespace

// From a parameter to its gradient's memory leads a chain of pointers, each a cache miss. Each loop
// follows one or two of them and prefetches some parameters ahead, so that the misses of different
// parameters overlap: that halves the time.
bool OptimizerGrads::collect(py::handle param_groups) {
  for (const py::handle group : param_groups) {
    if (!find_params(group[py::str("params")])) return false;
  }
  find_grads();
  const size_t n = grads_.size();
  for (size_t i = 0; i < n; ++i) {
    if (i + 2 * kAhead < n) prefetch_tensor(grad_impls_[i + 2 * kAhead]);
    if (i + kAhead < n) prefetch_storage(grad_impls_[i + kAhead]);
    if (!add(*params_[i], *grads_[i])) return false;
  }
  return true;
}

bool OptimizerGrads::find_params(py::handle params) {
  PyObject* const sequence = PySequence_Fast(params.ptr(), "params must be iterable");
  if (!sequence) throw py::error_already_set();
  sequences_.push_back(py::reinterpret_steal<py::object>(sequence));
  PyObject** const objects = PySequence_Fast_ITEMS(sequence);
  const auto n = static_cast<size_t>(PySequence_Fast_GET_SIZE(sequence));
  params_.reserve(params_.size() + n);
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) prefetch_bytes(objects[i + kAhead], 0, sizeof(THPVariable));
    if (!THPVariable_Check(objects[i])) {
      const py::str name = py::type::handle_of(objects[i]).attr("__name__");
      PyErr_Format(PyExc_AssertionError, "expected param to be torch.Tensor, got %U", name.ptr());
      throw py::error_already_set();
    }
    if (!(taken_ == Taken::all ? has_tensors_grad(objects[i]) : is_plain(objects[i]))) return false;
    params_.push_back(&THPVariable_Unpack(objects[i]));
  }
  return true;
}

void OptimizerGrads::find_grads() {
  const size_t n = params_.size();
  size_t found = 0;
  grads_.reserve(n);
  grad_impls_.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    if (i + 2 * kAhead < n) prefetch_tensor(params_[i + 2 * kAhead]->unsafeGetTensorImpl());
    if (i + kAhead < n) prefetch_grad(params_[i + kAhead]->unsafeGetTensorImpl());
    const at::Tensor& grad = params_[i]->unsafeGetTensorImpl()->grad();
    if (!grad.defined()) continue;
    grads_.push_back(&grad);
    grad_impls_.push_back(grad.unsafeGetTensorImpl());
    params_[found++] = params_[i];
  }
  params_.resize(found);
}

bool OptimizerGrads::add(const at::Tensor& param, const at::Tensor& grad) {
  if (grad.unsafeGetTensorImpl()->is_python_dispatch()) return false;
  if (taken_ == Taken::served) {
    const at::Device device = params_[0]->device();
    if (why_not_param(param, device) || why_not_grad(grad, device)) return false;
  }
  const bool half = grad.scalar_type() == at::kHalf;
  TORCH_CHECK_VALUE(
      allow_fp16_ || !half,
      "Attempting to unscale FP16 gradients. Either train FP32 weights under autocast, "
      "or FP16 weights by an optimizer of amp_ext.optim with master_weights=True, or "
      "construct the scaler with allow_fp16_grads=True");
  if (grad.layout() != at::kSparse) {
    list_for(grad.device()).add(grad);
    return true;
  }
  // An uncoalesced fp16 gradient may overflow only once its duplicates are added up.
  const bool coalesce = half || coalesce_ == Coalesce::all;
  const at::Tensor sparse = coalesce ? grad.coalesce() : grad;
  if (coalesce) coalesced_.emplace_back(param.unsafeGetTensorImpl(), sparse);
  list_for(sparse.device()).add(sparse_values_.emplace_back(sparse._values()));
  return true;
}

GradList& OptimizerGrads::list_for(at::Device device) {
  for (GradList& list : lists_) {
    if (list.device() == device) return list;
  }
  choose(op_, device);  // throws where there is none
  lists_.emplace_back(op_, access_, device);
  lists_.back().reserve(grads_.size());
  return lists_.back();
}

void OptimizerGrads::close() const {
  for (const GradList& list : lists_) list.close();
}

void OptimizerGrads::install_coalesced() {
  for (auto& [param, grad] : coalesced_) param->mutable_grad() = grad;
}

}  // namespace amp_ext
