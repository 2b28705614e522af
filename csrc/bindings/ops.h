// The ops as C++ functions, the same for every device.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <optional>

#include "tensor_args.h"

namespace amp_ext {

// On a list that is already checked and closed.
void unscale_(GradList& grads, const at::Tensor& found_inf, const at::Tensor& inv_scale);
void check_finite(GradList& grads, const at::Tensor& found_inf,
                  const std::optional<at::Tensor>& bad_tensor);

void update_scale_(at::Tensor& scale, at::Tensor& growth_tracker, at::TensorList found_infs,
                   double growth_factor, double backoff_factor, int64_t growth_interval,
                   std::optional<double> min_scale, std::optional<double> max_scale,
                   int64_t hysteresis, const std::optional<at::Tensor>& hysteresis_tracker,
                   const std::optional<at::Tensor>& skipped_steps);

using TensorPointers = c10::ArrayRef<const at::Tensor*>;

void cast_(TensorPointers outputs, TensorPointers inputs);

// Registers the ops for the dispatch key of `m`.
void register_ops(torch::Library& m);

}  // namespace amp_ext
