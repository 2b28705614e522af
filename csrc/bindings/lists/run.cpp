// Calls references in Python.
#include "lists/run.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <string_view>

#include "checks/python.h"

namespace py = pybind11;

namespace amp_ext {

ReferenceCall::ReferenceCall(const char* op, at::Device device) : op_(op), device_(device) {
  TORCH_CHECK(!is_capturing(device), op, ": no verified kernel runs this op on ", device,
              ", and its reference cannot be captured in a CUDA graph; see python -m amp_ext");
}

at::Tensor ReferenceCall::flat(const void* data, at::ScalarType type, int64_t numel) const {
  return at::for_blob(const_cast<void*>(data), {numel})
      .options(at::TensorOptions(type).device(device_))
      .target_device(device_)
      .make_tensor();
}

void ReferenceCall::add(const char* name, const at::Tensor& tensor) {
  arguments_[name] = object_of(tensor);
}

void ReferenceCall::add(const char* name, const std::vector<at::Tensor>& tensors) {
  py::list list;
  for (const at::Tensor& tensor : tensors)
    list.append(tensor.defined() ? object_of(tensor) : py::none());
  arguments_[name] = list;
}

void ReferenceCall::add(const char* name, const TensorList& list) {
  std::vector<at::Tensor> tensors;
  for (int64_t i = 0; i < list.size; ++i)
    tensors.push_back(flat(list.refs[i].data, list.refs[i].dtype, list.refs[i].numel));
  add(name, tensors);
}

void ReferenceCall::run() {
  const char* const name = op_ + std::string_view("amp_ext::").size();
  const py::object function = py::module_::import("amp_ext.ops").attr(name).attr("reference");
  const py::object result = function(**arguments_);
  if (result_) object_of(scalar(result_)).attr("copy_")(result);
}

}  // namespace amp_ext
