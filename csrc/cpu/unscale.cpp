#include <atomic>
#include <cmath>

#include "amp_ext/clip.h"
#include "amp_ext/launch.h"
#include "foreach.h"
#include "span.h"

namespace amp_ext::cpu {

Status launch_unscale(const UnscaleArgs& args, const CpuContext& context) {
  float factor = *args.inv_scale;
  if (args.norm) {
    if (!std::isfinite(*args.norm)) {
      *args.found_inf = 1.0f;
      return Status::ok;
    }
    factor *= clip_coefficient(*args.norm, args.max_norm);
    if (factor == 1.0f) return Status::ok;
  }
  const SpanKernels& span = span_kernels();
  std::atomic<bool> found{false};
  for_each_chunk(args.grads, context, [&](const Chunk& chunk) {
    const int type = static_cast<int>(chunk.dtype);
    const bool bad = factor == 1.0f ? span.check_finite[type](chunk.data, chunk.numel)
                                    : span.unscale[type](chunk.data, chunk.numel, factor);
    if (bad) found.store(true, std::memory_order_relaxed);
  });
  if (found) *args.found_inf = 1.0f;
  return Status::ok;
}

}  // namespace amp_ext::cpu
