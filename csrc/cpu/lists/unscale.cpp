#include <atomic>
#include <cmath>

#include "amp_ext/scale.h"
#include "backend.h"
#include "isa/span.h"
#include "lists/foreach.h"

namespace amp_ext::cpu {

Status CpuBackend::unscale(const UnscaleArgs& args, Services&) const {
  const float inv_scale = *args.inv_scale;
  float coefficient = 1.0f;
  if (args.norm) {
    if (!std::isfinite(*args.norm)) {
      *args.found_inf = 1.0f;
      return Status::ok;
    }
    coefficient = clip_coefficient(*args.norm, args.max_norm);
    if (inv_scale == 1.0f && coefficient == 1.0f) return Status::ok;
  }
  const SpanKernels& span = span_kernels();
  std::atomic<bool> found{false};
  for_each_chunk(args.grads, host_, [&](const TensorRef& t, const Chunk& chunk) {
    const int type = static_cast<int>(t.dtype);
    void* data = element(t.data, t.dtype, chunk.offset);
    const bool bad = inv_scale == 1.0f && coefficient == 1.0f
                         ? span.check_finite[type](data, chunk.numel)
                         : span.unscale[type](data, chunk.numel, inv_scale, coefficient);
    if (bad) found.store(true, std::memory_order_relaxed);
  });
  if (found) *args.found_inf = 1.0f;
  return Status::ok;
}

}  // namespace amp_ext::cpu
