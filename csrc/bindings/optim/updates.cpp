// Checks the arguments of an update.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include <array>
#include <cmath>
#include <optional>
#include <type_traits>
#include <vector>

#include "optim/optim.h"

namespace amp_ext {

[[gnu::flatten]] bool Updates::add_plain(const UpdateTensors& tensors, size_t place) {
  const at::TensorImpl* const param = tensors[kParam]->unsafeGetTensorImpl();
  const int64_t numel = param->numel();
  if (records_gradients_ || numel == 0) return false;
  const auto take = [&](Role role, auto*& data, DType& dtype) {
    if (!tensors[role]) return true;
    const at::TensorImpl* const tensor = tensors[role]->unsafeGetTensorImpl();
    if (tensor->key_set() != plain_keys_ || tensor->device() != device_ || !tensor->is_contiguous())
      return false;
    if (tensor->dtype() != plain_types_[role]) {
      const std::optional<DType> other = dtype_of(c10::typeMetaToScalarType(tensor->dtype()));
      if (!other || *other == DType::f64) return false;
      plain_types_[role] = tensor->dtype();
      plain_dtypes_[role] = *other;
    }
    dtype = plain_dtypes_[role];
    if (role == kStep ? tensor->numel() != 1 || dtype != DType::f32
                      : tensor->sizes() != param->sizes())
      return false;
    void* const memory = plain_memory(*tensor, role == kStep ? 1 : numel, size_of(dtype),
                                      role == kGrad ? Access::read : Access::write);
    data = static_cast<std::remove_reference_t<decltype(data)>>(memory);
    return memory != nullptr;
  };
  UpdateRef& ref = refs_.emplace_back();
  ref.numel = numel;
  ref.place = static_cast<uint32_t>(place);
  DType of_max{}, of_step{};
  const bool is_plain =
      take(kParam, ref.param, ref.param_dtype) && take(kGrad, ref.grad, ref.grad_dtype) &&
      take(kExpAvg, ref.exp_avg, ref.exp_avg_dtype) &&
      take(kExpAvgSq, ref.exp_avg_sq, ref.exp_avg_sq_dtype) &&
      take(kMaxExpAvgSq, ref.max_exp_avg_sq, of_max) && take(kCopy, ref.copy, ref.copy_dtype) &&
      take(kStep, ref.step, of_step) &&
      (!ref.copy || (is_16_bit(ref.copy_dtype) && ref.param_dtype == DType::f32)) &&
      (!ref.max_exp_avg_sq || of_max == ref.exp_avg_sq_dtype);
  if (!is_plain) refs_.pop_back();
  return is_plain;
}

void Updates::add_checked(const UpdateTensors& tensors, size_t place) {
  const size_t index = refs_.size();
  const at::Tensor& param = *tensors[kParam];
  std::array<void*, kRoles> data{};
  std::array<DType, kRoles> dtypes{};
  MemoryRange grad_memory;
  for (int role = 0; role < kRoles; ++role) {
    if (!tensors[role]) continue;
    const at::Tensor& tensor = *tensors[role];
    const Item item{op_, names_[role], index};
    const DType dtype = dtypes[role] = checked_dtype(op_, item, tensor, device_);
    const bool is_step = role == kStep, is_copy = role == kCopy;
    TORCH_CHECK_NOT_IMPLEMENTED(dtype != DType::f64, op_, ": ", item, " is ", tensor.scalar_type(),
                                ", expected float32, float16 or bfloat16: updates are computed in "
                                "float32, torch's own optimizers do them in float64");
    TORCH_CHECK(!is_step || (dtype == DType::f32 && tensor.numel() == 1), op_, ": ", item,
                " must be a float tensor of 1 element, got ", tensor.scalar_type(), " of shape ",
                tensor.sizes());
    TORCH_CHECK(is_step || tensor.sizes() == param.sizes(), op_, ": ", item,
                " must have the shape of params[", index, "], ", param.sizes(), ", got ",
                tensor.sizes());
    TORCH_CHECK(!is_copy || (is_16_bit(dtype) && dtypes[kParam] == DType::f32), op_, ": ", item,
                " must be float16 or bfloat16, of a float32 parameter, got ", tensor.scalar_type(),
                " of ", param.scalar_type());
    TORCH_CHECK(role != kMaxExpAvgSq || dtype == dtypes[kExpAvgSq], op_, ": ", item,
                " must have the dtype of exp_avg_sqs[", index, "], got ", tensor.scalar_type());
    if (role == kGrad) {
      if (!tensor._is_zerotensor()) {
        grad_memory = checked_memory(op_, item, tensor, Access::read);
        data[role] = grad_memory.data();
      }
      continue;
    }
    check_not_negated(op_, item, tensor);
    TORCH_CHECK(!tensor._is_zerotensor(), op_, ": ZeroTensors are immutable, expected ", item,
                " to have memory: clone() it");
    if (!tensor.is_non_overlapping_and_dense()) {
      check_no_internal_overlap(item, tensor);
      TORCH_CHECK(false, op_, ": ", item, " has holes (shape ", tensor.sizes(), ", strides ",
                  tensor.strides(), "), expected dense memory: clone() it");
    }
    TORCH_CHECK(is_step || same_order(tensor, param), op_, ": ", item,
                " must have the strides of params[", index, "], ", param.strides(), ", got ",
                tensor.strides(), ": torch.empty_like(param) has them");
    check_no_history(op_, item, tensor, records_gradients_);
    data[role] = checked_memory(op_, item, tensor, Access::write).data();
  }
  const at::Tensor& grad = *tensors[kGrad];
  if (param.numel() > 0 && (grad._is_zerotensor() || grad.is_neg() ||
                            !grad.is_non_overlapping_and_dense() || !same_order(grad, param))) {
    const at::NoGradGuard no_grad;
    if (grad.is_non_overlapping_and_dense())
      other_uses_.push_back({grad_memory, names_[kGrad], static_cast<int64_t>(index), false});
    gathered_.push_back(
        at::empty_strided(param.sizes(), param.strides(), grad.options()).copy_(grad));
    data[kGrad] = gathered_.back().mutable_data_ptr();
  }
  refs_.push_back({.param = data[kParam],
                   .grad = data[kGrad],
                   .exp_avg = data[kExpAvg],
                   .exp_avg_sq = data[kExpAvgSq],
                   .max_exp_avg_sq = data[kMaxExpAvgSq],
                   .copy = data[kCopy],
                   .step = static_cast<float*>(data[kStep]),
                   .param_dtype = dtypes[kParam],
                   .grad_dtype = dtypes[kGrad],
                   .exp_avg_dtype = dtypes[kExpAvg],
                   .exp_avg_sq_dtype = dtypes[kExpAvgSq],
                   .copy_dtype = dtypes[kCopy],
                   .numel = param.numel(),
                   .first_chunk = 0,
                   .place = static_cast<uint32_t>(place)});
  if (!param.unsafeGetTensorImpl()->is_python_dispatch()) plain_keys_ = param.key_set();
}

StepScalars Updates::add_scalars(const ScalarTensors& scalars) {
  check_max_norm(op_, scalars.max_norm, scalars.norm.has_value());
  const auto element = [&](const char* name, const std::optional<at::Tensor>& tensor,
                           Access access) -> float* {
    if (!tensor) return nullptr;
    void* const data = elements(op_, name, *tensor, at::kFloat, device_);
    other_uses_.push_back({{data, sizeof(float)}, name, -1, access == Access::write});
    return static_cast<float*>(data);
  };
  return {element("tensor_lr", scalars.tensor_lr, Access::read),
          element("found_inf", scalars.found_inf, Access::write),
          element("inv_scale", scalars.inv_scale, Access::read),
          element("norm", scalars.norm, Access::read),
          static_cast<float>(scalars.max_norm.value_or(INFINITY))};
}

std::vector<MemoryUse> Updates::uses() const {
  std::vector<MemoryUse> uses = other_uses_;
  uses.reserve(uses.size() + kRoles * refs_.size());
  for (size_t i = 0; i < refs_.size(); ++i) {
    const UpdateRef& u = refs_[i];
    const auto add = [&](Role role, const void* data, DType dtype, int64_t numel) {
      const MemoryRange range(data, numel * size_of(dtype));
      if (data) uses.push_back({range, names_[role], static_cast<int64_t>(i), role != kGrad});
    };
    add(kParam, u.param, u.param_dtype, u.numel);
    add(kGrad, u.grad, u.grad_dtype, u.numel);
    add(kExpAvg, u.exp_avg, u.exp_avg_dtype, u.numel);
    add(kExpAvgSq, u.exp_avg_sq, u.exp_avg_sq_dtype, u.numel);
    add(kMaxExpAvgSq, u.max_exp_avg_sq, u.exp_avg_sq_dtype, u.numel);
    add(kCopy, u.copy, u.copy_dtype, u.numel);
    add(kStep, u.step, DType::f32, 1);
  }
  return uses;
}

}  // namespace amp_ext
