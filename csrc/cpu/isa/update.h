// Declares the optimizers' updates of contiguous spans, compiled once per instruction set from
// update.cpp.
#pragma once

#include "amp_ext/optim.h"

namespace amp_ext::cpu {

// Update n elements of a tensor from `begin` on, a chunk, but not its step. `key` is a noise_key;
// null rounds to nearest.
struct UpdateKernels {
  void (*adam)(const UpdateRef& u, int64_t begin, int64_t n, const AdamFactors& factors,
               const uint32_t* key);
  void (*sgd)(const UpdateRef& u, int64_t begin, int64_t n, const SgdFactors& factors,
              const uint32_t* key);
};

// Returns the kernels of the widest instruction set that this processor runs.
const UpdateKernels& update_kernels();

}  // namespace amp_ext::cpu
