// The gradients of an optimizer as lists for the ops, without a loop in Python.
#pragma once

#include <pybind11/pybind11.h>

#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "checks/tensors.h"

namespace amp_ext {

// Which sparse gradients have their duplicates added up: those of fp16, whose sums may overflow, or
// all, as a norm needs them.
enum class Coalesce { fp16, all };

// How the lists of an optimizer are made: one for each device, or also for each way in which
// gradients are spread over processes, as norms need it.
enum class Lists { by_device, by_spread };

// What becomes of an optimizer's gradients.
struct GradsUse {
  const char* op;  // what errors name
  Access access;
  bool allow_fp16;
  Coalesce coalesce;
  Lists lists = Lists::by_device;
  bool across = false;  // whether other processes may have parts of them
};

// The gradients of one optimizer, as far as they are in this process, in order of first appearance.
class OptimizerGrads {
 public:
  explicit OptimizerGrads(const GradsUse& use) : use_(use) {}

  // Reads `.grad` of every parameter. False when one is not taken. Python code alone can handle a
  // gradient that is a Python tensor subclass, other than a DTensor of plain tensors, and a
  // parameter whose class has a `grad` of its own. The gradients of DTensors have been given the
  // placements of their parameters then.
  bool collect(pybind11::handle param_groups);

  // To be called before anything is written: throws the errors that concern the whole list.
  void close() const;

  // Makes the coalesced gradients the parameters' own.
  void install_coalesced();

  std::vector<GradList>& lists() { return lists_; }
  const std::vector<GradList>& lists() const { return lists_; }

  // The ways in which the parameters are spread over processes, those without gradients too: the
  // (mesh, placements) of DTensors, "fsdp" for those that FSDP1 has flattened, None where nothing
  // tells.
  const std::vector<pybind11::object>& spreads() const { return spreads_; }
  // That of a list, an index of these.
  size_t spread_index(size_t list) const { return spread_of_list_[list]; }

  // To be called after the launch of lists that are written: GradList::finish_writes() knows
  // nothing of the DTensors.
  void mark_dtensors_written() const {
    for (const at::Tensor& dtensor : dtensors_) mark_written(dtensor.unsafeGetTensorImpl());
  }

  // Of the gradients on the CPU.
  int64_t cpu_numel() const {
    int64_t total = 0;
    for (const GradList& list : lists_) {
      if (list.device().is_cpu()) total += list.numel();
    }
    return total;
  }

  bool are_all_on(at::Device device) const {
    return lists_.empty() || (lists_.size() == 1 && lists_[0].device() == device);
  }

  // Keeps the gradients alive as long as this, since other threads may drop them while the GIL is
  // released.
  void keep_alive() {
    if (!kept_.empty()) return;
    for (const at::Tensor* grad : grads_) kept_.push_back(*grad);
  }

 private:
  bool find_params(pybind11::handle params);
  bool find_grads();
  const at::Tensor* local_grad(const at::Tensor*& param);
  std::optional<size_t> find_spread(PyObject* param);
  bool add(size_t index, const at::Tensor& grad);
  GradList& list_for(at::Device device, size_t spread);

  GradsUse use_;
  std::vector<pybind11::object> sequences_;  // keep the parameters alive
  std::vector<const at::Tensor*> params_;    // those that have a gradient
  std::vector<size_t> spread_of_param_;      // of these
  std::vector<const at::Tensor*> grads_;
  // Gradients and, of DTensors, their parts and those of their parameters. Across processes they
  // are kept from the start: other threads may run while this one waits for a process.
  std::deque<at::Tensor> kept_;
  std::vector<at::Tensor> dtensors_;  // gradients
  std::vector<pybind11::object> spreads_;
  std::vector<GradList> lists_;
  std::vector<size_t> spread_of_list_;
  TensorKind taken_param_, taken_grad_;                            // the last that have been added
  std::vector<at::Tensor> sparse_values_;                          // kept alive for lists_
  std::vector<std::pair<at::TensorImpl*, at::Tensor>> coalesced_;  // parameter, its new gradient
};

}  // namespace amp_ext
