// Provides torch's threads, and products with FP32 sums by torch and by the MKL and oneDNN in
// torch's wheels.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>

#include <array>
#include <exception>
#include <memory>

#include "backends/backends.h"

// These are null if torch was built without MKL.
extern "C" {
using MklGemm = void(const char* trans_a, const char* trans_b, const int64_t* m, const int64_t* n,
                     const int64_t* k, const float* alpha, const void* a, const int64_t* lda,
                     const void* b, const int64_t* ldb, const float* beta, float* c,
                     const int64_t* ldc);
[[gnu::weak]] MklGemm sgemm_64_;
[[gnu::weak]] MklGemm gemm_f16f16f32_64_;
[[gnu::weak]] MklGemm gemm_bf16bf16f32_64_;
}

namespace amp_ext {
namespace {

void parallel_for(int64_t count, int64_t grain, void* context, ParallelBody body) {
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) { body(context, begin, end); });
}

void torchs_gemm(const LibraryGemmArgs& g) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto matrix = [](const void* data, int64_t rows, int64_t columns, int64_t ld,
                         bool transposed) {
    const std::array<int64_t, 2> strides{transposed ? 1 : ld, transposed ? ld : 1};
    return at::from_blob(const_cast<void*>(data), {rows, columns}, strides, at::kFloat);
  };
  const at::Tensor a = matrix(g.a, g.m, g.k, g.lda, g.a_transposed);
  const at::Tensor b = matrix(g.b, g.k, g.n, g.ldb, g.b_transposed);
  at::Tensor c = matrix(g.c, g.m, g.n, g.ldc, false);
  if (g.accumulate) {
    at::addmm_out(c, c, a, b);
  } else {
    at::mm_out(c, a, b);
  }
}

// Computes a column-major product: c^T = b^T @ a^T.
void mkls_gemm(const LibraryGemmArgs& g) {
  const auto letter = [](bool transposed) { return transposed ? "T" : "N"; };
  const float one = 1, beta = g.accumulate ? 1 : 0;
  const auto gemm = g.dtype == DType::f32   ? sgemm_64_
                    : g.dtype == DType::f16 ? gemm_f16f16f32_64_
                                            : gemm_bf16bf16f32_64_;
  gemm(letter(g.b_transposed), letter(g.a_transposed), &g.n, &g.m, &g.k, &one, g.b, &g.ldb, g.a,
       &g.lda, &beta, g.c, &g.ldc);
}

void library_gemm(const LibraryGemmArgs& g) {
  // A call through torch's dispatcher takes 1 us longer.
  sgemm_64_ ? mkls_gemm(g) : torchs_gemm(g);
}

void block_gemm(const LibraryGemmArgs& g) {
  at::native::cpublas::brgemm(g.m, g.n, g.k, g.lda, g.ldb, g.ldc, g.accumulate,
                              static_cast<const at::BFloat16*>(g.a),
                              static_cast<const at::BFloat16*>(g.b), g.c);
  at::native::cpublas::brgemm_release();  // AMX's registers
}

bool has_block_gemm() {
  if (!at::globalContext().userEnabledMkldnn()) return false;
  // oneDNN throws if the processor or ONEDNN_MAX_CPU_ISA leaves it without instructions.
  static const bool works = [] {
    const at::BFloat16 ones[2] = {1, 1};
    float sum = 0;
    try {
      block_gemm({ones, ones, &sum, DType::bf16, 1, 1, 2, 2, 1, 1, false, false, false});
    } catch (const std::exception&) {
    }
    return sum == 2;
  }();
  return works;
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

int64_t torchs_product_step(DType dtype) {
  // torch.backends.mkldnn.enabled: a user may set it at any time.
  return at::globalContext().userEnabledMkldnn() ? cpu_backend().product_step(dtype) : 0;
}

const Host& host() {
  static const Host functions{parallel_for,   [] { return int64_t{at::get_num_threads()}; },
                              library_gemm,   gemm_f16f16f32_64_ && gemm_bf16bf16f32_64_,
                              has_block_gemm, block_gemm,
                              workspace};
  return functions;
}

}  // namespace amp_ext
