// Provides copies of weights that an optimizer writes in the same pass as the weights. Regions use
// the copies in the place of casts.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace amp_ext {

// Declares that copies[i], of the shape of weights[i], equals a cast to its dtype. This holds until
// either is written with a new version or gets other memory. Neither is kept alive.
void provide_copies(const std::vector<at::Tensor>& weights, const std::vector<at::Tensor>& copies);

// Returns the copy of `weight` in `type`, if provide_copies still holds for it; else undefined.
at::Tensor provided_copy(const at::Tensor& weight, at::ScalarType type);

}  // namespace amp_ext
