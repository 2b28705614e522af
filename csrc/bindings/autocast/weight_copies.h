// Makes low-precision copies that take the place of their originals in the autograd graph.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

namespace amp_ext {

// Returns `tensor` in `type`. If it requires a gradient, the copy's gradient is passed on to
// `tensor` in the type of `tensor`: unlike the gradient of a cast it is never rounded to `type`.
//
// A float32 leaf that requires a gradient, such as a weight, is copied once per version and type
// while torch's autocast keeps its own copies: until the outermost region is left or
// torch.clear_autocast_cache() is called. A view of one is copied at every use, as torch does:
// fused optimizers, .data and NumPy write to weights without a new version.
at::Tensor lowered(const at::Tensor& tensor, at::ScalarType type);

// Returns view(tensor), lowered as a view of the copy of `tensor`.
at::Tensor lowered_view(const at::Tensor& tensor, at::ScalarType type,
                        c10::function_ref<at::Tensor(const at::Tensor&)> view);

}  // namespace amp_ext
