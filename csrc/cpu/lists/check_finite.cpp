#include <atomic>

#include "backend.h"
#include "isa/span.h"
#include "lists/foreach.h"

namespace amp_ext::cpu {

Status CpuBackend::check_finite(const CheckFiniteArgs& args, Services&) const {
  const SpanKernels& span = span_kernels();
  std::atomic<bool> found{false};
  for_each_chunk(args.grads, host_, [&](const TensorRef& t, const Chunk& chunk) {
    const void* data = element(t.data, t.dtype, chunk.offset);
    if (span.check_finite[static_cast<int>(t.dtype)](data, chunk.numel))
      found.store(true, std::memory_order_relaxed);
  });
  if (found) *args.found_inf = 1.0f;
  return Status::ok;
}

}  // namespace amp_ext::cpu
