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

inline UpdateRef part_of(const UpdateRef& u, const Chunk& chunk) {
  const auto from = [&](auto* data, DType dtype) -> decltype(data) {
    return data ? element(data, dtype, chunk.offset) : nullptr;
  };
  UpdateRef part = u;
  part.numel = chunk.numel;
  if (chunk.offset == 0) return part;
  part.param = from(u.param, u.param_dtype);
  part.grad = from(u.grad, u.grad_dtype);
  part.exp_avg = from(u.exp_avg, u.exp_avg_dtype);
  part.exp_avg_sq = from(u.exp_avg_sq, u.exp_avg_sq_dtype);
  part.max_exp_avg_sq = from(u.max_exp_avg_sq, u.exp_avg_sq_dtype);
  part.copy = from(u.copy, u.copy_dtype);
  return part;
}

inline uint32_t key_of(uint32_t update, const Chunk& chunk) {
  return noise_key(update, static_cast<uint32_t>(chunk.ref),
                   static_cast<uint32_t>(chunk.offset / kChunkElements));
}

inline void advance_steps(const UpdateList& list) {
  if (!has_steps(list)) return;
  for (int64_t i = 0; i < list.size; ++i) *list.refs[i].step += 1.0f;
}

}  // namespace amp_ext::cpu
