// The updates of the optimizers on contiguous spans, compiled once per instruction set from
// update.cpp.
#pragma once

#include "amp_ext/optim.h"

namespace amp_ext::cpu {

// On all elements of `span`, at most a chunk, without its step. `key` is a noise_key, null to round
// to nearest.
struct UpdateKernels {
  void (*adam)(const UpdateRef& span, const AdamFactors& factors, const uint32_t* key);
  void (*sgd)(const UpdateRef& span, const SgdFactors& factors, const uint32_t* key);
};

// The widest set that this processor runs.
const UpdateKernels& update_kernels();

}  // namespace amp_ext::cpu
