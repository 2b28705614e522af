// The gradients of an optimizer as lists for the ops, without a loop in Python.
#pragma once

#include <pybind11/pybind11.h>

#include <utility>
#include <vector>

#include "checks/tensors.h"

namespace amp_ext {

// Which sparse gradients have their duplicates added up: those of fp16, whose sums may overflow, or
// all, as a norm needs them.
enum class Coalesce { fp16, all };

// Which parameters and gradients are taken: all that C++ code can read, or those alone that the
// kernels of amp_ext.optim serve.
enum class Taken { all, served };

// The gradients of one optimizer, by device in order of first appearance.
class OptimizerGrads {
 public:
  // `op` is what errors name.
  OptimizerGrads(const char* op, Access access, bool allow_fp16, Coalesce coalesce,
                 Taken taken = Taken::all)
      : op_(op), access_(access), allow_fp16_(allow_fp16), coalesce_(coalesce), taken_(taken) {}

  // Reads `.grad` of every parameter. False when one is not taken. Python code alone can handle a
  // gradient that is a Python tensor subclass, and a parameter whose class has a `grad` of its own.
  bool collect(pybind11::handle param_groups);

  // To be called before anything is written: throws the errors that concern the whole list.
  void close() const;

  // Makes the coalesced gradients the parameters' own.
  void install_coalesced();

  std::vector<GradList>& lists() { return lists_; }
  const std::vector<GradList>& lists() const { return lists_; }

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

  // The gradients, so that they live on while the GIL is released.
  std::vector<at::Tensor> owners() const {
    std::vector<at::Tensor> result;
    for (const at::Tensor* grad : grads_) result.push_back(*grad);
    return result;
  }

 private:
  bool find_params(pybind11::handle params);
  void find_grads();
  bool add(const at::Tensor& param, const at::Tensor& grad);
  GradList& list_for(at::Device device);

  const char* op_;
  Access access_;
  bool allow_fp16_;
  Coalesce coalesce_;
  Taken taken_;
  std::vector<pybind11::object> sequences_;  // keep the parameters alive
  std::vector<const at::Tensor*> params_;    // those that have a gradient
  std::vector<const at::Tensor*> grads_;
  std::vector<at::TensorImpl*> grad_impls_;
  std::vector<GradList> lists_;
  std::vector<at::Tensor> sparse_values_;                          // kept alive for lists_
  std::vector<std::pair<at::TensorImpl*, at::Tensor>> coalesced_;  // parameter, its new gradient
};

}  // namespace amp_ext
