// The copies of weights that regions keep.
#pragma once

#include <ATen/core/Tensor.h>

namespace amp_ext {

// The copy of `leaf` that is kept, made if need be; undefined where none is kept.
at::Tensor kept_copy(const at::Tensor& leaf, at::ScalarType type);

}  // namespace amp_ext
