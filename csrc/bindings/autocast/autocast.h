// Overrides torch's autocast kernels of matrix products.
#pragma once

#include <ATen/core/Tensor.h>

namespace amp_ext {

// Registers our kernels in place of torch's. Outside of our regions (regions.h) they do the same as
// torch's kernels.
void override_torchs();

// Restores torch's kernels. No thread may be within a region of ours.
void restore_torchs();

}  // namespace amp_ext
