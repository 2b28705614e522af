// Declares the optimizers' updates as C++ functions, the same for every device.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "amp_ext/optim.h"
#include "checks/tensors.h"

namespace amp_ext {

constexpr auto kAdam = "amp_ext::adam_";
constexpr auto kSgd = "amp_ext::sgd_";

// Launch updates of a checked list. Its tensors are alive, and their versions are not bumped.
void adam_(at::Device device, const AdamArgs& args);
void sgd_(at::Device device, const SgdArgs& args);

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
extern const RoleNames kAdamNames, kSgdNames;

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

  void reserve(size_t n);

  // Checks a parameter's tensors and appends them. All tensors are strided, on the device, and in
  // memory that has not been freed; a step has one element, all others the parameter's shape. The
  // parameter is dense; written tensors have its order and are not negated. Parameters and moments
  // are fp32, fp16 or bf16, a step is fp32, and a copy has 16 bits and an fp32 parameter. A
  // gradient in another order, or negated, is copied.
  void add(const UpdateTensors& tensors) {
    if (!add_plain(tensors)) add_checked(tensors);
  }

  // Checks the scalars.
  StepScalars add_scalars(const ScalarTensors& scalars);

  // Returns an error for memory that is written and overlaps anything, or none. Call it after all
  // tensors and scalars have been added.
  std::optional<std::string> overlap() const;

  // Returns whether list() shows copies of gradients in the place of their own memory.
  bool has_copies() const { return !gathered_.empty(); }
  UpdateList list() const { return {refs_.data(), static_cast<int64_t>(refs_.size())}; }
  at::Device device() const { return device_; }

 private:
  // Appends contiguous tensors of the kinds that the last parameter had, at a fraction of the cost.
  // Returns false, and does nothing, for others.
  bool add_plain(const UpdateTensors& tensors);
  void add_checked(const UpdateTensors& tensors);

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
