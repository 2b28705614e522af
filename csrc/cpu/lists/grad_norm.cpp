#include <cmath>
#include <numeric>

#include "backend.h"
#include "isa/span.h"
#include "lists/foreach.h"

namespace amp_ext::cpu {

// Computes one fp64 sum per chunk and adds the chunks in order: results are bitwise equal for any
// number of threads.
Status CpuBackend::grad_norm(const GradNormArgs& args, Services& services) const {
  const SpanKernels& span = span_kernels();
  const float inv_scale = args.inv_scale ? *args.inv_scale : 1.0f;
  int64_t chunks = 0;
  for (int64_t i = 0; i < args.grads.size; ++i) chunks += chunk_count(args.grads.refs[i].numel);
  auto* const partial_sums = static_cast<double*>(services.scratch(chunks * sizeof(double)));
  for_each_chunk(args.grads, host_, [&](const TensorRef& t, const Chunk& chunk) {
    const void* data = element(t.data, t.dtype, chunk.offset);
    partial_sums[chunk.index] =
        span.sum_squares[static_cast<int>(t.dtype)](data, chunk.numel, inv_scale);
  });

  const double total = std::accumulate(partial_sums, partial_sums + chunks, 0.0);
  *args.norm = static_cast<float>(std::sqrt(total));
  // Squares of infinities and NaNs do not cancel.
  if (!std::isfinite(*args.norm)) *args.found_inf = 1.0f;
  return Status::ok;
}

}  // namespace amp_ext::cpu
