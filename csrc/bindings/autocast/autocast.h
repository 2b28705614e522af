// torch's autocast kernels of matrix products, overridden.
#pragma once

#include <ATen/core/Tensor.h>

namespace amp_ext {

// Puts our kernels in the place of torch's. Outside of our regions (regions.h) they do the same.
void override_torchs();

// Puts torch's kernels back. No thread may be within a region of ours.
void restore_torchs();

}  // namespace amp_ext
