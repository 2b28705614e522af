#include <atomic>
#include <cmath>

#include "amp_ext/scale.h"
#include "backend.h"
#include "isa/span.h"
#include "lists/foreach.h"

namespace amp_ext::cpu {

Status CpuBackend::unscale(const UnscaleArgs& args, Services& services) const {
  const float inv_scale = *args.inv_scale;
  float coefficient = 1.0f;
  if (args.norm) {
    if (!std::isfinite(*args.norm)) {
      *args.found_inf = 1.0f;
      return Status::ok;
    }
    coefficient = clip_coefficient(*args.norm, args.max_norm);
  }
  if (inv_scale == 1.0f && coefficient == 1.0f)
    return args.norm ? Status::ok : check_finite({args.grads, args.found_inf}, services);
  const SpanKernels& span = span_kernels();
  std::atomic<bool> found{false};
  for_each_chunk(args.grads, host_, [&](const TensorRef& t, const Chunk& chunk) {
    void* data = element(t.data, t.dtype, chunk.offset);
    if (span.unscale[static_cast<int>(t.dtype)](data, chunk.numel, inv_scale, coefficient))
      found.store(true, std::memory_order_relaxed);
  });
  if (found) *args.found_inf = 1.0f;
  return Status::ok;
}

}  // namespace amp_ext::cpu
