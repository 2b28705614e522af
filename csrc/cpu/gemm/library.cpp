#include "gemm/large.h"

namespace amp_ext::cpu {
namespace {

// The layout of an operand with dense rows or columns. ld is 0 if neither are dense.
struct Layout {
  int64_t ld = 0;
  bool transposed = false;
};

Layout layout_of(const MatrixRef& x, int64_t rows, int64_t columns) {
  if (x.column_stride == 1 && (rows == 1 || x.row_stride >= columns))
    return {std::max(x.row_stride, columns), false};
  if (x.row_stride == 1 && (columns == 1 || x.column_stride >= rows))
    return {std::max(x.column_stride, rows), true};
  return {};
}

}  // namespace

bool Direct::can(const GemmArgs& g, const Host& host) {
  const bool is_16_bit = g.a.dtype == DType::f16 || g.a.dtype == DType::bf16;
  return host.has_16_bit_gemm && is_16_bit && g.a.dtype == g.b.dtype &&
         layout_of(g.a, g.m, g.k).ld && layout_of(g.b, g.k, g.n).ld;
}

void Direct::multiply(const Part& part, float*, const Host& host) {
  const Layout a = layout_of(g_.a, g_.m, g_.k), b = layout_of(g_.b, g_.k, g_.n);
  host.library_gemm({address(g_.a, part.matrix, part.rows.begin, 0),
                     address(g_.b, part.matrix, 0, part.columns.begin), part.c, g_.a.dtype,
                     part.rows.size, part.columns.size, g_.k, a.ld, b.ld,
                     std::max(part.ldc, part.columns.size), a.transposed, b.transposed, part.adds});
}

Widening::Widening(const GemmArgs& g, int64_t rows, int64_t columns, int64_t depth)
    : k_(g.k), rows_(rows), columns_(columns), depth_(depth), a_(g.a), b_(g.b) {}

void Widening::multiply(const Part& part, float* workspace, const Host& host) {
  for (int64_t p = 0; p < k_; p += depth_) {
    const Range depth{p, std::min(depth_, k_ - p)};
    const Block& left = a_.block(part.matrix, part.rows, depth, workspace, host);
    const Block& right =
        b_.block(part.matrix, depth, part.columns, workspace + rows_ * depth_, host);
    host.library_gemm({left.data, right.data, part.c, DType::f32, part.rows.size, part.columns.size,
                       depth.size, left.ld, right.ld, part.ldc, left.transposed, right.transposed,
                       part.adds || p > 0});
  }
}

}  // namespace amp_ext::cpu
