// Declares the ops on lists as C++ functions, the same for every device.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "checks/tensors.h"

namespace amp_ext {

// Run an op on a list that is already checked and closed.
void unscale_(GradList& grads, const at::Tensor& found_inf, const at::Tensor& inv_scale,
              const std::optional<at::Tensor>& norm, std::optional<double> max_norm);
at::Tensor grad_norm(const GradList& grads, const at::Tensor& found_inf,
                     const std::optional<at::Tensor>& inv_scale,
                     const std::optional<at::Tensor>& norms);
void check_finite(GradList& grads, const at::Tensor& found_inf);

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

// Makes the list of a call, checked and closed.
inline GradList checked(const char* op, Access access, at::TensorList grads, at::Device device) {
  GradList list(op, access, device);
  list.reserve(grads.size());
  for (const at::Tensor& grad : grads) list.add(grad);
  list.close();
  return list;
}

}  // namespace amp_ext
