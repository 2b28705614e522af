// Declares the optimizers' updates of contiguous spans, compiled once per instruction set from
// update.cpp.
#pragma once

#include "amp_ext/optim.h"

namespace amp_ext::cpu {

// Update all elements of `span`, at most a chunk, but not its step. `key` is a noise_key; null
// rounds to nearest.
struct UpdateKernels {
  void (*adam)(const UpdateRef& span, const AdamFactors& factors, const uint32_t* key);
  void (*sgd)(const UpdateRef& span, const SgdFactors& factors, const uint32_t* key);
};

// Returns the kernels of the widest instruction set that this processor runs.
const UpdateKernels& update_kernels();

}  // namespace amp_ext::cpu
