// The ops as C++ functions, the same for every device.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <optional>

#include "tensor_args.h"

namespace amp_ext {

// Where the other tensors of a call on gradients come from: fresh ones have been made for it, so
// that they cannot lie in a gradient.
enum class Others { given, fresh };

// On a list that is already checked and closed.
void unscale_(GradList& grads, const at::Tensor& found_inf, const at::Tensor& inv_scale,
              const std::optional<at::Tensor>& norm, std::optional<double> max_norm, Others others);
at::Tensor grad_norm(const GradList& grads, const at::Tensor& found_inf,
                     const std::optional<at::Tensor>& inv_scale,
                     const std::optional<at::Tensor>& norms, Others others);
void check_finite(GradList& grads, const at::Tensor& found_inf, Others others);

// How the scale moves, as Python says it.
struct ScaleOptions {
  double growth_factor;
  double backoff_factor;
  int64_t growth_interval;
  std::optional<double> min_scale;
  std::optional<double> max_scale;
  int64_t hysteresis;
  std::optional<at::Tensor> hysteresis_tracker;
  std::optional<at::Tensor> skipped_steps;
};

void update_scale_(at::Tensor& scale, at::Tensor& growth_tracker, at::TensorList found_infs,
                   const ScaleOptions& options);

using TensorPointers = c10::ArrayRef<const at::Tensor*>;

void cast_(TensorPointers outputs, TensorPointers inputs);

// Registers the ops for the dispatch key of `m`.
void register_ops(torch::Library& m);

}  // namespace amp_ext
