// Copies of weights that an optimizer writes in the same pass as the weights: regions use them in
// the place of casts.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace amp_ext {

// Says that copies[i], of the shape of weights[i], holds what a cast to its dtype gives as long as
// neither is written with a new version or gets other memory. Neither is kept alive.
void provide_copies(const std::vector<at::Tensor>& weights, const std::vector<at::Tensor>& copies);

// The copy of `weight` in `type`, for which provide_copies still holds; undefined if there is none.
at::Tensor provided_copy(const at::Tensor& weight, at::ScalarType type);

}  // namespace amp_ext
