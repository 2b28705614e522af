#include "scaler/optimizer_grads.h"

#include <ATen/ops/_values.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/python_variable.h>

#include "backends/backends.h"
#include "checks/dtensor.h"
#include "checks/python.h"
#include "optim/served.h"

namespace py = pybind11;

namespace amp_ext {
namespace {

bool has_tensors_grad(PyObject* tensor) {
  if (THPVariable_CheckExact(tensor)) return true;
  return py::type::handle_of(tensor).attr("grad").is(py::handle(THPVariableClass).attr("grad"));
}

// As Python's hasattr, which makes no exception where there is none.
bool has_attribute(PyObject* object, py::handle name) {
  PyObject* found = nullptr;
#if PY_VERSION_HEX >= 0x030d0000
  const int status = PyObject_GetOptionalAttr(object, name.ptr(), &found);
#else
  const int status = _PyObject_LookupAttr(object, name.ptr(), &found);
#endif
  if (status < 0) throw py::error_already_set();
  Py_XDECREF(found);
  return status > 0;
}

// As torch.distributed.fsdp marks the parameters that it has flattened, of which each process has
// a part, perhaps an empty one.
bool is_flattened(PyObject* param) {
  static const py::handle name = PyUnicode_InternFromString("_fsdp_flattened");
  return has_attribute(param, name);
}

}  // namespace

bool OptimizerGrads::collect(py::handle param_groups) {
  for (const py::handle group : param_groups) {
    if (!find_params(group[py::str("params")])) return false;
  }
  if (!find_grads()) return false;
  for (size_t i = 0; i < grads_.size(); ++i) {
    if (!add(i, *grads_[i])) return false;
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
    if (!THPVariable_Check(objects[i])) {
      const py::str name = py::type::handle_of(objects[i]).attr("__name__");
      PyErr_Format(PyExc_AssertionError, "expected param to be torch.Tensor, got %U", name.ptr());
      throw py::error_already_set();
    }
    if (!has_tensors_grad(objects[i]) && !(use_.across && is_dtensor(objects[i]))) return false;
    params_.push_back(&THPVariable_Unpack(objects[i]));
    if (!use_.across) continue;
    const std::optional<size_t> spread = find_spread(objects[i]);
    if (!spread) return false;
    spread_of_param_.push_back(*spread);
  }
  return true;
}

// None for a DTensor that is a sum over processes.
std::optional<size_t> OptimizerGrads::find_spread(PyObject* param) {
  static const py::handle fsdp = PyUnicode_InternFromString("fsdp");
  py::object spread = py::none();
  std::optional<Spread> of_dtensor;
  if (is_dtensor(param)) {
    of_dtensor = spread_of(param);
    spread = py::make_tuple(of_dtensor->mesh, of_dtensor->placements);
  } else if (is_flattened(param)) {
    spread = py::reinterpret_borrow<py::object>(fsdp);
  }
  for (size_t i = 0; i < spreads_.size(); ++i) {
    if (spreads_[i].is(spread) || spreads_[i].equal(spread)) return i;
  }
  if (of_dtensor && of_dtensor->has_partial()) return std::nullopt;
  spreads_.push_back(std::move(spread));
  return spreads_.size() - 1;
}

bool OptimizerGrads::find_grads() {
  const size_t n = params_.size();
  size_t found = 0;
  grads_.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    at::TensorImpl* const param = params_[i]->unsafeGetTensorImpl();
    const at::Tensor* grad = &param->grad();
    if (!grad->defined()) continue;
    if (use_.across) {
      const bool is_wrapped =
          grad->unsafeGetTensorImpl()->is_python_dispatch() ||
          (param->is_python_dispatch() && is_dtensor(object_of(*params_[i]).ptr()));
      if (is_wrapped && !(grad = local_grad(params_[i]))) return false;
      grad = &kept_.emplace_back(*grad);
      spread_of_param_[found] = spread_of_param_[i];
    }
    grads_.push_back(grad);
    params_[found++] = params_[i];
  }
  params_.resize(found);
  return true;
}

// The gradient of a DTensor in this process, or null if it is no plain, strided tensor. `param`
// becomes the part of the DTensor.
const at::Tensor* OptimizerGrads::local_grad(const at::Tensor*& param) {
  const py::object dtensor = object_of(*param);
  if (!is_dtensor(dtensor.ptr()) || !spread_grad_as_param(dtensor.ptr())) return nullptr;
  const at::Tensor& whole = dtensors_.emplace_back(param->unsafeGetTensorImpl()->grad());
  PyObject* const grad = local_of(object_of(whole).ptr());
  PyObject* const local = local_of(dtensor.ptr());
  if (!is_plain(grad) || !is_plain(local)) return nullptr;
  if (THPVariable_Unpack(grad).layout() != at::kStrided) return nullptr;
  param = &kept_.emplace_back(THPVariable_Unpack(local));
  return &THPVariable_Unpack(grad);
}

bool OptimizerGrads::add(size_t index, const at::Tensor& grad) {
  const at::Tensor& param = *params_[index];
  const size_t spread = use_.across ? spread_of_param_[index] : 0;
  // All that is asked below depends on the kinds alone.
  if (taken_grad_.has(*grad.unsafeGetTensorImpl()) &&
      taken_param_.has(*param.unsafeGetTensorImpl())) {
    list_for(grad.device(), spread).add(grad);
    return true;
  }
  if (grad.unsafeGetTensorImpl()->is_python_dispatch()) return false;
  const bool half = grad.scalar_type() == at::kHalf;
  TORCH_CHECK_VALUE(
      use_.allow_fp16 || !half,
      "Attempting to unscale FP16 gradients. Either train FP32 weights under autocast, "
      "or FP16 weights by an optimizer of amp_ext.optim with master_weights=True, or "
      "construct the scaler with allow_fp16_grads=True");
  if (grad.layout() != at::kSparse) {
    list_for(grad.device(), spread).add(grad);
    taken_param_ = TensorKind(param);
    taken_grad_ = TensorKind(grad);
    return true;
  }
  // An uncoalesced fp16 gradient may overflow only once its duplicates are added up.
  const bool coalesce = half || use_.coalesce == Coalesce::all;
  const at::Tensor sparse = coalesce ? grad.coalesce() : grad;
  if (coalesce) coalesced_.emplace_back(param.unsafeGetTensorImpl(), sparse);
  list_for(sparse.device(), spread).add(sparse_values_.emplace_back(sparse._values()));
  return true;
}

GradList& OptimizerGrads::list_for(at::Device device, size_t spread) {
  if (use_.lists == Lists::by_device) spread = 0;
  for (size_t i = 0; i < lists_.size(); ++i) {
    if (lists_[i].device() == device && spread_of_list_[i] == spread) return lists_[i];
  }
  choose(use_.op, device);  // throws where there is none
  spread_of_list_.push_back(spread);
  lists_.emplace_back(use_.op, use_.access, device);
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
