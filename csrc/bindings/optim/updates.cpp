// The checks of an update's arguments.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>

#include "optim/optim.h"

namespace amp_ext {

const RoleNames kAdamNames = {"params",          "grads",  "exp_avgs", "exp_avg_sqs",
                              "max_exp_avg_sqs", "copies", "steps"};
const RoleNames kSgdNames = {"params", "grads", "momentum_buffers", nullptr, nullptr,
                             "copies", "steps"};

void Updates::reserve(size_t n) {
  refs_.reserve(n);
  written_.reserve(3 * n);
  writes_.reserve(3 * n);
  reads_.reserve(n);
}

void Updates::add_written(const char* name, int64_t index, const MemoryRange& range,
                          const at::Tensor& tensor) {
  writes_.push_back({name, index, range});
  written_.push_back(tensor.unsafeGetTensorImpl());
}

void Updates::add(const UpdateTensors& tensors) {
  const size_t index = refs_.size();
  const at::Tensor& param = *tensors[kParam];
  UpdateRef ref{};
  ref.numel = param.numel();
  for (int role = 0; role < kRoles; ++role) {
    if (!tensors[role]) continue;
    const at::Tensor& tensor = *tensors[role];
    const Item item{op_, names_[role], index};
    const DType dtype = checked_dtype(item, tensor, device_);
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
    TORCH_CHECK(!is_copy || (dtype != DType::f32 && ref.param_dtype == DType::f32), op_, ": ", item,
                " must be float16 or bfloat16, of a float32 parameter, got ", tensor.scalar_type(),
                " of ", param.scalar_type());
    TORCH_CHECK(role != kMaxExpAvgSq || dtype == ref.exp_avg_sq_dtype, op_, ": ", item,
                " must have the dtype of exp_avg_sqs[", index, "], got ", tensor.scalar_type());
    if (role == kGrad) {
      const MemoryRange range = checked_memory(op_, item, tensor, Access::read);
      ref.grad = range.data();
      ref.grad_dtype = dtype;
      reads_.push_back({names_[role], static_cast<int64_t>(index), range});
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
    check_no_history(item, tensor, records_gradients_);
    const MemoryRange range = checked_memory(op_, item, tensor, Access::write);
    add_written(names_[role], static_cast<int64_t>(index), range, tensor);
    void* const data = range.data();
    switch (role) {
      case kParam:
        ref.param = data;
        ref.param_dtype = dtype;
        break;
      case kExpAvg:
        ref.exp_avg = data;
        ref.exp_avg_dtype = dtype;
        break;
      case kExpAvgSq:
        ref.exp_avg_sq = data;
        ref.exp_avg_sq_dtype = dtype;
        break;
      case kMaxExpAvgSq: ref.max_exp_avg_sq = data; break;
      case kCopy:
        ref.copy = data;
        ref.copy_dtype = dtype;
        break;
      case kStep: ref.step = static_cast<float*>(data); break;
    }
  }
  const at::Tensor& grad = *tensors[kGrad];
  if (ref.numel > 0 && (grad._is_zerotensor() || grad.is_neg() ||
                        !grad.is_non_overlapping_and_dense() || !same_order(grad, param))) {
    const at::NoGradGuard no_grad;
    gathered_.push_back(empty_in_order_of(param, grad).copy_(grad));
    ref.grad = gathered_.back().const_data_ptr();
  }
  refs_.push_back(ref);
}

StepScalars Updates::add_scalars(const ScalarTensors& scalars) {
  check_max_norm(op_, scalars.max_norm, scalars.norm.has_value());
  const auto element = [&](const char* name, const std::optional<at::Tensor>& tensor,
                           Access access) -> float* {
    if (!tensor) return nullptr;
    float* const data = one_element<float>(op_, name, *tensor, device_);
    const MemoryRange range(data, sizeof(float));
    if (access == Access::write) {
      add_written(name, -1, range, *tensor);
    } else {
      reads_.push_back({name, -1, range});
    }
    return data;
  };
  return {element("tensor_lr", scalars.tensor_lr, Access::read),
          element("found_inf", scalars.found_inf, Access::write),
          element("inv_scale", scalars.inv_scale, Access::read),
          element("norm", scalars.norm, Access::read),
          static_cast<float>(scalars.max_norm.value_or(INFINITY))};
}

void Updates::close() const {
  std::vector<Place> writes = writes_;
  std::erase_if(writes, [](const Place& place) { return place.range.is_empty(); });
  std::ranges::sort(writes, {}, [](const Place& place) { return place.range.begin; });
  for (size_t i = 1; i < writes.size(); ++i) {
    if (overlap(writes[i - 1].range, writes[i].range)) throw_overlap(writes[i - 1], writes[i]);
  }
  for (const Place& read : reads_) {
    const auto behind = std::ranges::partition_point(
        writes, [&](const Place& place) { return place.range.begin < read.range.end; });
    if (behind != writes.begin() && overlap(behind[-1].range, read.range))
      throw_overlap(behind[-1], read);
  }
}

void Updates::throw_overlap(const Place& a, const Place& b) const {
  const auto said = [](const Place& place) {
    return place.index < 0 ? std::string(place.name) : c10::str(place.name, '[', place.index, ']');
  };
  TORCH_CHECK(false, op_, ": ", said(a), " and ", said(b),
              " overlap in memory, expected what is written apart from all else: clone() one");
}

}  // namespace amp_ext
