// Declares the ops on lists as C++ functions, the same for every device.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "checks/tensors.h"

namespace amp_ext {

// Run an op on a list of checked gradients.
void unscale_(GradList& grads, const at::Tensor& found_inf, const at::Tensor& inv_scale,
              const std::optional<at::Tensor>& norm, std::optional<double> max_norm);
at::Tensor grad_norm(const GradList& grads, const at::Tensor& found_inf,
                     const std::optional<at::Tensor>& inv_scale,
                     const std::optional<at::Tensor>& norms);
void check_finite(GradList& grads, const at::Tensor& found_inf);

// Makes the list of a call.
inline GradList checked(const char* op, Access access, at::TensorList grads, at::Device device) {
  GradList list(op, access, device);
  list.reserve(grads.size());
  for (const at::Tensor& grad : grads) list.add(grad);
  return list;
}

}  // namespace amp_ext
