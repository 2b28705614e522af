// The optimizers' updates as C++ functions, the same for every device.
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

// On a list that is already checked, whose tensors are alive. Versions are not bumped.
void adam_(at::Device device, const AdamArgs& args);
void sgd_(at::Device device, const SgdArgs& args);

// What a parameter's update consists of.
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

// What errors call the list of each role.
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

  // Checks a parameter's tensors and appends them. All are strided, on the device, of the
  // parameter's shape (a step has one element) and in memory that has not been freed. The parameter
  // is fp32, fp16 or bf16 and dense, and all that is written has its order and is stored as it is;
  // moments are fp32, fp16 or bf16, a copy is 16 bits wide and its parameter fp32, a step fp32. A
  // gradient in another order, or negated, is copied.
  void add(const UpdateTensors& tensors) {
    if (!add_plain(tensors)) add_checked(tensors);
  }

  // Appends contiguous tensors that are as plain as the parameters before, about which nothing has
  // to be said, at a fraction of the cost. False, and nothing done, for others.
  bool add_plain(const UpdateTensors& tensors);
  void add_checked(const UpdateTensors& tensors);

  // Checks the scalars.
  StepScalars add_scalars(const ScalarTensors& scalars);

  // To be called once after all else: throws where what is written overlaps anything.
  void close() const;

  UpdateList list() const { return {refs_.data(), static_cast<int64_t>(refs_.size())}; }
  at::Device device() const { return device_; }

 private:
  // A tensor of a list, or with an index of -1 an argument of its own.
  struct Place {
    const char* name;
    int64_t index;
    MemoryRange range;
  };

  const char* op_;
  const RoleNames& names_;
  at::Device device_;
  bool records_gradients_ = at::GradMode::is_enabled();
  std::vector<UpdateRef> refs_;
  std::vector<Place> writes_, reads_;  // scalars, and dense gradients that were copied
  c10::DispatchKeySet plain_keys_;     // of a strided tensor that is stored as it is
  // What each role had in the last plain row.
  std::array<caffe2::TypeMeta, kRoles> plain_types_;
  std::array<DType, kRoles> plain_dtypes_{};
  std::vector<at::Tensor> gathered_;  // dense copies of gradients, kept for the launch
};

}  // namespace amp_ext
