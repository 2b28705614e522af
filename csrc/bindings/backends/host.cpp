// What the CPU's backend needs: torch's threads and torch's matrix products with FP32 sums.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <c10/util/Exception.h>

#include <array>
#include <memory>
#include <vector>

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
  if (g.accumulate) {
    at::addmm_out(c, c, a, b);
  } else {
    at::mm_out(c, a, b);
  }
}

// ---- blocks of 16-bit operands, by oneDNN ------------------------------------------------------

template <class T>
void block_gemm_of(const BlockGemmArgs& g) {
  at::native::cpublas::brgemm(g.m, g.n, g.k, g.lda, g.ldb, g.ldc, g.accumulate,
                              static_cast<const T*>(g.a), static_cast<const T*>(g.b), g.c);
}

void block_gemm(const BlockGemmArgs& g) {
  g.dtype == DType::f16 ? block_gemm_of<at::Half>(g) : block_gemm_of<at::BFloat16>(g);
}

void end_block_gemms() { at::native::cpublas::brgemm_release(); }

// The layout with which a product of small integers is right: oneDNN has no function for it, and
// throws where it has no kernel.
template <class T>
BlockLayout find_layout(DType dtype) {
  constexpr int64_t m = 2, n = 32, k = 64;
  std::vector<T> a(m * k), rows(k * n), pairs(k * n);
  std::vector<float> c(m * n), expected(m * n);
  for (int64_t p = 0; p < k; ++p) {
    for (int64_t i = 0; i < m; ++i) a[i * k + p] = static_cast<float>((p + i) % 5 - 2);
    for (int64_t j = 0; j < n; ++j) {
      const auto value = static_cast<float>((p * p + 3 * j) % 7 - 3);
      rows[p * n + j] = pairs[(p / 2 * n + j) * 2 + p % 2] = value;
      for (int64_t i = 0; i < m; ++i) expected[i * n + j] += value * a[i * k + p];
    }
  }
  const auto is_right = [&](const std::vector<T>& b) {
    try {
      block_gemm({a.data(), b.data(), c.data(), dtype, m, n, k, k, n, n, false});
      end_block_gemms();
    } catch (const std::exception&) {
      return false;
    }
    return c == expected;
  };
  return is_right(pairs)  ? BlockLayout::pairs
         : is_right(rows) ? BlockLayout::rows
                          : BlockLayout::none;
}

BlockLayout block_layout(DType dtype) {
  // torch.backends.mkldnn.enabled, which a user may set at any time.
  if (!at::globalContext().userEnabledMkldnn()) return BlockLayout::none;
  static const BlockLayout f16 = find_layout<at::Half>(DType::f16);
  static const BlockLayout bf16 = find_layout<at::BFloat16>(DType::bf16);
  return dtype == DType::f16 ? f16 : dtype == DType::bf16 ? bf16 : BlockLayout::none;
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
  static constexpr Host functions{parallel_for, library_gemm,    block_layout,
                                  block_gemm,   end_block_gemms, workspace};
  return functions;
}

}  // namespace amp_ext
