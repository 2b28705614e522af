#include "gemm/large.h"

namespace amp_ext::cpu {

Layout layout_of(const MatrixRef& x, int64_t rows, int64_t columns) {
  if (x.column_stride == 1 && (rows == 1 || x.row_stride >= columns))
    return {std::max(x.row_stride, columns), false};
  if (x.row_stride == 1 && (columns == 1 || x.column_stride >= rows))
    return {std::max(x.column_stride, rows), true};
  return {};
}

bool Direct::can(const GemmArgs& g, const Host& host) {
  const bool is_16_bit = g.a.dtype == DType::f16 || g.a.dtype == DType::bf16;
  return host.has_16_bit_gemm && is_16_bit && g.a.dtype == g.b.dtype &&
         layout_of(g.a, g.m, g.k).ld && layout_of(g.b, g.k, g.n).ld;
}

void Direct::multiply(const Part& part, float*, const Host& host) {
  const Layout a = layout_of(g_.a, g_.m, g_.k), b = layout_of(g_.b, g_.k, g_.n);
  host.library_gemm({address(g_.a, part.matrix, part.rows.begin, 0),
                     address(g_.b, part.matrix, 0, part.columns.begin), part.c, g_.a.dtype,
                     part.rows.size, part.columns.size, g_.k, a.ld, b.ld, part.ldc, a.transposed,
                     b.transposed, part.adds});
}

Widening::Widening(const GemmArgs& g, int64_t rows, int64_t columns, int64_t depth, int64_t share)
    : g_(g), rows_(rows), columns_(columns), depth_(depth), share_(share), a_(g.a), b_(g.b) {}

int64_t Widening::workspace() const {
  return shares() * block_floats() + (shares() - 1) * rows_ * columns_;
}

void Widening::multiply(const Part& part, float* workspace, const Host& host) {
  if (shares() == 1) return multiply_depths(part, {0, g_.k}, a_, b_, workspace, host);
  const int64_t size = part.rows.size * part.columns.size;
  float* const partial_sums = workspace + shares() * block_floats();
  parallel(host, shares(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      Part own = part;
      if (i > 0) {
        own.c = partial_sums + (i - 1) * size;
        own.ldc = part.columns.size;
        own.adds = false;
      }
      Widened a(g_.a), b(g_.b);
      const Range depths{i * share_, std::min(share_, g_.k - i * share_)};
      multiply_depths(own, depths, a, b, workspace + i * block_floats(), host);
    }
  });
  const int64_t n = part.columns.size;
  parallel(host, part.rows.size, grain(kConvertGrain, n * shares()),
           [&](int64_t begin, int64_t end) {
             for (int64_t r = begin; r < end; ++r) {
               for (int64_t i = 1; i < shares(); ++i) {
                 const float* const from = partial_sums + (i - 1) * size + r * n;
                 for (int64_t j = 0; j < n; ++j) part.c[r * part.ldc + j] += from[j];
               }
             }
           });
}

void Widening::multiply_depths(const Part& part, Range depths, Widened& a, Widened& b,
                               float* workspace, const Host& host) const {
  for (int64_t p = 0; p < depths.size; p += depth_) {
    const Range depth{depths.begin + p, std::min(depth_, depths.size - p)};
    const Block& left = a.block(part.matrix, part.rows, depth, workspace, host);
    const Block& right =
        b.block(part.matrix, depth, part.columns, workspace + rows_ * depth_, host);
    host.library_gemm({left.data, right.data, part.c, DType::f32, part.rows.size, part.columns.size,
                       depth.size, left.ld, right.ld, part.ldc, left.transposed, right.transposed,
                       part.adds || p > 0});
  }
}

}  // namespace amp_ext::cpu
