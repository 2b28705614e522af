// Declares the optimizers' updates as C++ functions, the same for every device.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "amp_ext/backend.h"
#include "checks/tensors.h"

namespace amp_ext {

// The tensors of a parameter's update.
enum Role : int {
  kParam,
  kGrad,
  kExpAvg,  // sgd: the momentum buffer
  kExpAvgSq,
  kMaxExpAvgSq,
  kCopy,
  kStep,
  kRoles,
};

// The names of the lists of each role, for errors.
using RoleNames = std::array<const char*, kRoles>;

// The ops of the updates. Group has an optimizer's options: a number or a tensor for lr, then the
// other fields of Options.
struct Adam {
  using Args = AdamArgs;
  using Options = AdamOptions;
  using Group = std::tuple<pybind11::object, double, double, double, double, bool, bool, bool>;
  static constexpr auto kOp = "amp_ext::adam_";
  static constexpr auto kLaunch = &ListBackend::adam;
  static constexpr RoleNames kNames{"params",          "grads",  "exp_avgs", "exp_avg_sqs",
                                    "max_exp_avg_sqs", "copies", "steps"};
};

struct Sgd {
  using Args = SgdArgs;
  using Options = SgdOptions;
  using Group = std::tuple<pybind11::object, double, double, double, bool, bool, bool>;
  static constexpr auto kOp = "amp_ext::sgd_";
  static constexpr auto kLaunch = &ListBackend::sgd;
  static constexpr RoleNames kNames{"params", "grads", "momentum_buffers", nullptr, nullptr,
                                    "copies", "steps"};
};

using UpdateTensors = std::array<const at::Tensor*, kRoles>;  // null where there is none

// The scalars of a step as tensors of one element.
struct ScalarTensors {
  std::optional<at::Tensor> tensor_lr;
  std::optional<at::Tensor> found_inf;
  std::optional<at::Tensor> inv_scale;
  std::optional<at::Tensor> norm;
  std::optional<double> max_norm;
};

// The updates of one call, all on one device. Tensors must outlive it.
class Updates {
 public:
  Updates(const char* op, const RoleNames& names, at::Device device)
      : op_(op), names_(names), device_(device) {}

  void reserve(size_t n) { refs_.reserve(n); }

  // Checks a parameter's tensors and appends them. All tensors are strided, on the device, and in
  // memory that has not been freed; a step has one element, all others the parameter's shape. The
  // parameter is dense; written tensors have its order and are not negated. Parameters and moments
  // are fp32, fp16 or bf16, a step is fp32, and a copy has 16 bits and an fp32 parameter. A
  // gradient in another order, or negated, is copied. `place` is as in UpdateRef.
  void add(const UpdateTensors& tensors, size_t place) {
    if (!add_plain(tensors, place)) add_checked(tensors, place);
  }

  // Appends contiguous tensors of the kinds that the last parameter had, at a fraction of the cost.
  // Returns false, and appends nothing, for others.
  bool add_plain(const UpdateTensors& tensors, size_t place);
  void add_checked(const UpdateTensors& tensors, size_t place);

  // Checks the scalars.
  StepScalars add_scalars(const ScalarTensors& scalars);

  // Returns the memory of all tensors and scalars. What is written must overlap nothing else.
  std::vector<MemoryUse> uses() const;

  // Returns whether list() shows copies of gradients in the place of their own memory.
  bool has_copies() const { return !gathered_.empty(); }
  UpdateList list() const { return {refs_.data(), static_cast<int64_t>(refs_.size())}; }
  at::Device device() const { return device_; }

 private:
  const char* op_;
  const RoleNames& names_;
  at::Device device_;
  bool records_gradients_ = at::GradMode::is_enabled();
  std::vector<UpdateRef> refs_;
  std::vector<MemoryUse> other_uses_;  // scalars, and dense gradients that were copied
  c10::DispatchKeySet plain_keys_;     // of a strided tensor that is stored as it is
  // The types of each role in the last plain row.
  std::array<caffe2::TypeMeta, kRoles> plain_types_;
  std::array<DType, kRoles> plain_dtypes_{};
  std::vector<at::Tensor> gathered_;  // dense copies of gradients, kept for the launch
};

}  // namespace amp_ext
