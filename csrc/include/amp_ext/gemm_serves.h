// Which products the GEMM kernels compute.
#pragma once

#include <cmath>
#include <cstdint>

#include "amp_ext/gemm_tiles.h"
#include "amp_ext/launch.h"

namespace amp_ext {

constexpr int64_t ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }

// An operand as the kernel sees it: lines of contiguous elements. Strides of indices that have but
// one value mean nothing.
struct OperandLayout {
  bool served = false;
  Major major = Major::k;
  bool aligned = false;
};

inline OperandLayout layout_of(const MatrixRef& x, int64_t mn_stride, int64_t k_stride, int64_t mn,
                               int64_t k, int64_t matrices) {
  const auto as_major = [&](Major major) {
    const bool by_k = major == Major::k;
    const int64_t length = by_k ? k : mn, stride = by_k ? k_stride : mn_stride;
    const int64_t lines = by_k ? mn : k, line_stride = by_k ? mn_stride : k_stride;
    const bool aligned = reinterpret_cast<uintptr_t>(x.data) % 16 == 0 &&
                         (lines <= 1 || line_stride % 8 == 0) &&
                         (matrices <= 1 || x.batch_stride % 8 == 0);
    return OperandLayout{length <= 1 || stride == 1, major, aligned};
  };
  const OperandLayout by_k = as_major(Major::k), by_mn = as_major(Major::mn);
  if (by_k.served && (by_k.aligned || !by_mn.served || !by_mn.aligned)) return by_k;
  return by_mn;  // which may not be served either
}

inline OperandLayout layout_of_a(const GemmArgs& g) {
  return layout_of(g.a, g.a.row_stride, g.a.column_stride, g.m, g.k, g.batch * g.terms);
}

inline OperandLayout layout_of_b(const GemmArgs& g) {
  return layout_of(g.b, g.b.column_stride, g.b.row_stride, g.n, g.k, g.batch * g.terms);
}

constexpr int64_t kGemmMostBlocks = INT32_MAX;  // of a grid along x

// Whether the kernel computes a product: what it does not serve is the library's.
inline bool gemm_serves(const GemmArgs& g) {
  const auto is_16_bit = [](DType dtype) { return dtype == DType::f16 || dtype == DType::bf16; };
  const auto is_served = [](const MatrixRef& x) { return !x.data || x.dtype != DType::f64; };
  const auto has_rows = [](const MatrixRef& x) { return !x.data || x.column_stride == 1; };
  // The smallest tile alone bounds the number of blocks.
  const double tiles = std::ceil(g.m / 64.0) * std::ceil(g.n / 64.0) * g.batch;
  const double steps = std::ceil(g.k / 32.0) * g.terms;  // at most; numbers of 32 bits count them
  return is_16_bit(g.a.dtype) && g.a.dtype == g.b.dtype && layout_of_a(g).served &&
         layout_of_b(g).served && g.out.dtype != DType::f64 && is_served(g.c) &&
         g.bias.dtype != DType::f64 && is_served(g.aux) && has_rows(g.out) && has_rows(g.aux) &&
         tiles <= kGemmMostBlocks && g.k <= INT32_MAX && g.terms <= INT32_MAX && steps <= INT32_MAX;
}

// ---- sm90
// ----------------------------------------------------------------------------------------

// Coordinates are numbers of 32 bits, those behind the edge in a cluster's last tile too.
constexpr int64_t kTmaMostSize = INT32_MAX - 1024;
constexpr int64_t kTmaMostStride = int64_t{1} << 40;  // bytes, exclusive

// Whether a tensor map describes rows of the result, or of what is laid out like it.
inline bool tma_serves_rows(const MatrixRef& x, const GemmArgs& g) {
  const int bytes = size_of(x.dtype);
  const auto is_stride = [&](int64_t stride, int64_t least) {
    return stride >= least && stride < kTmaMostStride / bytes && stride * bytes % 16 == 0;
  };
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.column_stride == 1 &&
         (g.m <= 1 || is_stride(x.row_stride, g.n)) &&
         (g.batch <= 1 || is_stride(x.batch_stride, 1));
}

// Whether one describes an operand.
inline bool tma_serves(const MatrixRef& x, const OperandLayout& layout, int64_t mn_stride,
                       int64_t k_stride, int64_t mn, int64_t k, int64_t matrices) {
  if (!layout.aligned) return false;
  const bool by_k = layout.major == Major::k;
  const int64_t length = by_k ? k : mn, lines = by_k ? mn : k;
  const int64_t line_stride = by_k ? mn_stride : k_stride;
  return (lines <= 1 || (line_stride >= length && line_stride < kTmaMostStride / 2)) &&
         (matrices <= 1 || (x.batch_stride >= 0 && x.batch_stride < kTmaMostStride / 2));
}

// Whether the kernel for sm_90a computes a product that the other one serves.
inline bool gemm_serves_sm90(const GemmArgs& g) {
  const auto is_size = [](int64_t size) { return size > 0 && size <= kTmaMostSize; };
  if (!gemm_serves(g) || !is_size(g.m) || !is_size(g.n) || !is_size(g.k) || !is_size(g.batch) ||
      !is_size(g.terms) || g.terms > kTmaMostSize / g.batch)
    return false;
  const int64_t matrices = g.batch * g.terms;
  const auto is_like_out = [&](const MatrixRef& x) {
    return !x.data || (x.dtype == g.out.dtype && tma_serves_rows(x, g));
  };
  return tma_serves(g.a, layout_of_a(g), g.a.row_stride, g.a.column_stride, g.m, g.k, matrices) &&
         tma_serves(g.b, layout_of_b(g), g.b.column_stride, g.b.row_stride, g.n, g.k, matrices) &&
         tma_serves_rows(g.out, g) && !(g.c.data && g.aux.data) && is_like_out(g.c) &&
         is_like_out(g.aux) && (!g.bias.data || g.n <= 1 || g.bias.stride == 1);
}

}  // namespace amp_ext
