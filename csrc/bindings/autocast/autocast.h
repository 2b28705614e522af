// torch's autocast kernels of matrix products, overridden.
#pragma once

#include <ATen/core/Tensor.h>

namespace amp_ext {

// Registers our kernels in place of torch's. Outside of our regions (regions.h) they do what
// torch's do.
void override_torchs();

// Restores torch's kernels. No thread may be within a region of ours.
void restore_torchs();

}  // namespace amp_ext
