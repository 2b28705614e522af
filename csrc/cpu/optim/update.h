// Defines the shared parts of the optimizers' updates.
#pragma once

#include "backend.h"
#include "isa/update.h"
#include "lists/foreach.h"

namespace amp_ext::cpu {

// Returns whether the step makes no update. A norm that is not finite sets found_inf.
inline bool leaves_out(const StepScalars& scalars) {
  const bool bad = has_bad_norm(scalars);
  if (bad && scalars.found_inf) *scalars.found_inf = 1.0f;
  return bad || is_skipped(scalars);
}

inline uint32_t key_of(uint32_t update, const UpdateRef& u, const Chunk& chunk) {
  return noise_key(update, u.place, static_cast<uint32_t>(chunk.offset / kChunkElements));
}

inline void advance_steps(const UpdateList& list) {
  if (!has_steps(list)) return;
  for (int64_t i = 0; i < list.size; ++i) *list.refs[i].step += 1.0f;
}

}  // namespace amp_ext::cpu
