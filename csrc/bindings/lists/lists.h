// Declares the ops on lists as C++ functions, the same for every device.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <optional>

#include "checks/tensors.h"

namespace amp_ext {

// The origin of the other tensors of a call on gradients. Fresh tensors were allocated for the call
// and so cannot overlap a gradient.
enum class Others { given, fresh };

// Run an op on a list that is already checked and closed.
void unscale_(GradList& grads, const at::Tensor& found_inf, const at::Tensor& inv_scale,
              const std::optional<at::Tensor>& norm, std::optional<double> max_norm, Others others);
at::Tensor grad_norm(const GradList& grads, const at::Tensor& found_inf,
                     const std::optional<at::Tensor>& inv_scale,
                     const std::optional<at::Tensor>& norms, Others others);
void check_finite(GradList& grads, const at::Tensor& found_inf, Others others);

// The policy of the scale: Python's arguments.
struct ScaleOptions {
  double growth_factor;
  double backoff_factor;
  int64_t growth_interval;
  std::optional<double> min_scale;
  std::optional<double> max_scale;
  int64_t hysteresis;
  std::optional<at::Tensor> hysteresis_tracker;
  std::optional<at::Tensor> skipped_steps;
  std::optional<at::Tensor> next_step;
};

void update_scale_(at::Tensor& scale, at::Tensor& growth_tracker, at::TensorList found_infs,
                   const ScaleOptions& options);

// Makes the list of a call, checked and closed. Items are tensors, or the dispatcher's values.
inline const at::Tensor& tensor_of(const at::Tensor& tensor) { return tensor; }
inline const at::Tensor& tensor_of(const c10::IValue& value) { return value.toTensor(); }

template <class Item>
GradList checked(const char* op, Access access, c10::ArrayRef<Item> grads, at::Device device) {
  GradList list(op, access, device);
  list.reserve(grads.size());
  for (const Item& grad : grads) list.add(tensor_of(grad));
  list.close();
  return list;
}

}  // namespace amp_ext
