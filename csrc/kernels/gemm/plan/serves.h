// Decides which products the GEMM kernels can compute: types, layouts, alignment, sizes.
#pragma once

#include <cmath>
#include <cstdint>

#include "amp_ext/gemm.h"
#include "gemm/plan/tiles.h"

namespace amp_ext {

// An operand as lines of contiguous elements. The stride of a dimension of size 1 has no effect.
struct OperandLayout {
  Major major;
  int64_t length;  // of a line
  int64_t lines;
  int64_t line_stride;
  bool contiguous;  // false: no kernel can load it
  bool aligned;
};

inline OperandLayout layout_of(const MatrixRef& x, int64_t mn_stride, int64_t k_stride, int64_t mn,
                               int64_t k, int64_t matrices) {
  const auto as_lines = [&](Major major, int64_t length, int64_t stride, int64_t lines,
                            int64_t line_stride) {
    const bool aligned = reinterpret_cast<uintptr_t>(x.data) % 16 == 0 &&
                         (lines <= 1 || line_stride % 8 == 0) &&
                         (matrices <= 1 || x.batch_stride % 8 == 0);
    return OperandLayout{major, length, lines, line_stride, length <= 1 || stride == 1, aligned};
  };
  const OperandLayout by_k = as_lines(Major::k, k, k_stride, mn, mn_stride);
  const OperandLayout by_mn = as_lines(Major::mn, mn, mn_stride, k, k_stride);
  if (by_k.contiguous && (by_k.aligned || !by_mn.contiguous || !by_mn.aligned)) return by_k;
  return by_mn;
}

inline OperandLayout layout_of_a(const GemmArgs& g) {
  return layout_of(g.a, g.a.row_stride, g.a.column_stride, g.m, g.k, g.batch * g.terms);
}

inline OperandLayout layout_of_b(const GemmArgs& g) {
  return layout_of(g.b, g.b.column_stride, g.b.row_stride, g.n, g.k, g.batch * g.terms);
}

// Returns whether the sm_80 kernel can compute a product.
inline bool can_run_sm80(const GemmArgs& g) {
  const auto is_narrow = [](const MatrixRef& x) { return !x.data || x.dtype != DType::f64; };
  // The narrowest tiles bound the number of blocks.
  const double tiles = std::ceil(g.m / 16.0) * std::ceil(g.n / 16.0) * g.batch;
  const double steps = std::ceil(g.k / 32.0) * g.terms;  // bounds a 32-bit count
  return is_16_bit(g.a.dtype) && g.a.dtype == g.b.dtype && layout_of_a(g).contiguous &&
         layout_of_b(g).contiguous && g.out.dtype != DType::f64 && is_narrow(g.c) &&
         g.bias.dtype != DType::f64 && g.out.column_stride == 1 && tiles <= INT32_MAX &&
         g.k <= INT32_MAX && g.terms <= INT32_MAX && steps <= INT32_MAX;
}

// ---- sm_90a -------------------------------------------------------------------------------------

// The largest size that TMA's 32-bit coordinates address, less a tile's reach past the edge.
constexpr int64_t kTmaMostSize = INT32_MAX - 1024;
constexpr int64_t kTmaMostStride = int64_t{1} << 40;  // bytes, exclusive

// Returns whether a tensor map can describe rows of the result or of c.
inline bool tma_can_store(const MatrixRef& x, const GemmArgs& g) {
  const int bytes = size_of(x.dtype);
  const auto is_stride = [&](int64_t stride, int64_t least) {
    return stride >= least && stride < kTmaMostStride / bytes && stride * bytes % 16 == 0;
  };
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.column_stride == 1 &&
         (g.m <= 1 || is_stride(x.row_stride, g.n)) &&
         (g.batch <= 1 || is_stride(x.batch_stride, 1));
}

// Returns whether a tensor map can describe an operand.
inline bool tma_can_load(const MatrixRef& x, const OperandLayout& layout, int64_t matrices) {
  constexpr int64_t kMost = kTmaMostStride / 2;
  return layout.aligned &&
         (layout.lines <= 1 ||
          (layout.line_stride >= layout.length && layout.line_stride < kMost)) &&
         (matrices <= 1 || (x.batch_stride >= 0 && x.batch_stride < kMost));
}

// Returns whether the sm_90a kernel can compute a product.
inline bool can_run_sm90(const GemmArgs& g) {
  const auto is_size = [](int64_t size) { return size > 0 && size <= kTmaMostSize; };
  if (!can_run_sm80(g) || !is_size(g.m) || !is_size(g.n) || !is_size(g.k) || !is_size(g.batch) ||
      !is_size(g.terms) || g.terms > kTmaMostSize / g.batch)
    return false;
  const int64_t matrices = g.batch * g.terms;
  return tma_can_load(g.a, layout_of_a(g), matrices) &&
         tma_can_load(g.b, layout_of_b(g), matrices) && tma_can_store(g.out, g) &&
         (!g.c.data || (g.c.dtype == g.out.dtype && tma_can_store(g.c, g)));
}

// Returns whether TMA can add the product to out in memory, which excludes any other epilogue. (As
// with atomic additions, FP32 values below 2^-126 may count as 0.)
inline bool adds_in_memory(const GemmArgs& g) {
  return adds_to_out(g) && g.out.dtype == DType::f32 && g.beta == 1;
}

// Returns whether alpha and the bias alone complete the result, in fp32 or the operands' type.
inline bool is_plain(const GemmArgs& g) {
  return (!g.c.data || adds_in_memory(g)) &&
         (g.out.dtype == DType::f32 || g.out.dtype == g.a.dtype);
}

}  // namespace amp_ext
