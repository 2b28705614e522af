// The copies of weights that regions keep.
#pragma once

#include <ATen/core/Tensor.h>

namespace amp_ext {

// The copy of `leaf` that is kept, made if need be; undefined where none is kept.
at::Tensor kept_copy(const at::Tensor& leaf, at::ScalarType type);

// From now on a region casts all weights that it is expected to need in one launch, when it needs
// the first; off until then, since a weight may be written behind autograd's back between that and
// its own first use.
void cast_weights_together(bool on);

}  // namespace amp_ext
