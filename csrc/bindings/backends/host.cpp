// What the CPU's backend needs: torch's threads and torch's FP32 matrix product.
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <c10/util/Exception.h>

#include <array>
#include <memory>

#include "backends/backends.h"

namespace amp_ext {
namespace {

void parallel_for(int64_t count, int64_t grain, void* context, ParallelBody body) {
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) { body(context, begin, end); });
}

// The library is torch's own matrix product.
void library_gemm(const LibraryGemmArgs& g) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto matrix = [](const float* data, int64_t rows, int64_t columns, int64_t ld,
                         bool transposed) {
    const std::array<int64_t, 2> strides{transposed ? 1 : ld, transposed ? ld : 1};
    return at::from_blob(const_cast<float*>(data), {rows, columns}, strides, at::kFloat);
  };
  const at::Tensor a = matrix(g.a, g.m, g.k, g.lda, g.a_transposed);
  const at::Tensor b = matrix(g.b, g.k, g.n, g.ldb, g.b_transposed);
  at::Tensor c = matrix(g.c, g.m, g.n, g.ldc, false);
  if (g.accumulate || g.alpha != 1) {
    at::addmm_out(c, c, a, b, g.accumulate ? 1 : 0, g.alpha);
  } else {
    at::mm_out(c, a, b);
  }
}

// Kept between calls: fresh memory would be mapped and cleared page by page every time.
float* workspace(int64_t count) {
  thread_local std::unique_ptr<float[]> memory;
  thread_local int64_t size = 0;
  if (count > size) {
    size = 0;
    memory.reset();
    memory.reset(new float[count]);  // may throw
    size = count;
  }
  return memory.get();
}

}  // namespace

const Host& host() {
  static constexpr Host functions{parallel_for, library_gemm, workspace};
  return functions;
}

}  // namespace amp_ext
