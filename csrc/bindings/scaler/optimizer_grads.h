// Collects the gradients of an optimizer in lists for the ops.
#pragma once

#include <pybind11/pybind11.h>

#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "checks/tensors.h"
#include "params/params.h"

namespace amp_ext {

struct GradsUse {
  const char* op;  // for errors
  Access access;
  bool allow_fp16;
  bool has_norm;  // all sparse gradients are coalesced then, and each sharding has its own list
  bool across;    // whether other processes may have parts of the gradients
};

// The gradients of one optimizer in this process, in order of first appearance.
class OptimizerGrads {
 public:
  OptimizerGrads(const GradsUse& use, pybind11::handle param_groups)
      : use_(use), params_(param_groups) {}

  // Reads `.grad` of every parameter. Returns false for gradients that only Python code can handle:
  // Python tensor subclasses, except DTensors of plain tensors, and gradients of a parameter with
  // a `grad` that its class defines. The gradients of DTensors have been given the placements of
  // their parameters then.
  bool collect();

  // Makes the coalesced gradients the parameters' own.
  void install_coalesced();

  std::vector<GradList>& lists() { return lists_; }

  // The shardings of the parameters, with and without gradients: the (mesh, placements) of
  // DTensors, "fsdp" for parameters that FSDP1 has flattened, else None.
  const std::vector<pybind11::object>& shardings() const { return shardings_; }
  // The index of a list's sharding.
  size_t sharding_index(size_t list) const { return sharding_of_list_[list]; }

  // Call it after the launch of lists that are written: GradList::finish_writes() bumps the
  // versions of local tensors alone.
  void mark_dtensors_written() const {
    for (const at::Tensor& dtensor : dtensors_) mark_written(dtensor.unsafeGetTensorImpl());
  }

 private:
  bool add_param(PyObject* object);
  std::optional<size_t> find_sharding(PyObject* param);
  bool add(const at::Tensor& param, const at::Tensor& grad, size_t sharding);
  GradList& list_for(at::Device device, size_t sharding);

  GradsUse use_;
  Params params_;
  std::deque<at::Tensor> kept_;       // other threads may drop gradients during the launches
  std::vector<at::Tensor> dtensors_;  // gradients
  std::vector<pybind11::object> shardings_;
  std::vector<GradList> lists_;
  std::vector<size_t> sharding_of_list_;
  std::vector<at::Tensor> sparse_values_;                          // kept alive for lists_
  std::vector<std::pair<at::TensorImpl*, at::Tensor>> coalesced_;  // parameter, its new gradient
};

}  // namespace amp_ext
