#include <atomic>

#include "amp_ext/launch.h"
#include "foreach.h"
#include "span.h"

namespace amp_ext::cpu {

Status launch_check_finite(const CheckFiniteArgs& args, const CpuContext& context) {
  const SpanKernels& span = span_kernels();
  std::atomic<int64_t> lowest{args.grads.size};
  for_each_chunk(args.grads, context, [&](const TensorRef& t, const Chunk& chunk) {
    const void* data = element(t.data, t.dtype, chunk.offset);
    if (!span.check_finite[static_cast<int>(t.dtype)](data, chunk.numel)) return;
    int64_t seen = lowest.load(std::memory_order_relaxed);
    while (chunk.ref < seen &&
           !lowest.compare_exchange_weak(seen, chunk.ref, std::memory_order_relaxed)) {
    }
  });
  if (lowest == args.grads.size) return Status::ok;
  *args.found_inf = 1.0f;
  if (args.bad_tensor) *args.bad_tensor = lowest;
  return Status::ok;
}

}  // namespace amp_ext::cpu
