// Multiplies by the library's GEMM: 16-bit operands in place, or blocks widened to fp32.
#include "gemm/plan.h"

namespace amp_ext::cpu {
namespace {

// Extents of cached parts are multiples of this, unless they end the matrix.
constexpr int64_t kRowGroup = 64;

// The fewest lines of a widened block for each thread, and the elements of more lines, which stay
// in the thread's cache until they are read.
constexpr int64_t kCachedExtent = 256, kCachedElements = 1 << 16;

int64_t cached_extent(int64_t extent, int64_t other, int64_t threads) {
  const int64_t lines = kCachedElements / std::max<int64_t>(other, 1) / kRowGroup * kRowGroup;
  return std::min({extent, kBlockExtent, threads * std::max(kCachedExtent, lines)});
}

// The operands of a product, and memory for a block of each.
struct Operands {
  Widened a, b;
  float *a_block, *b_block;
};

void multiply_widened(const Part& part, Range depths, int64_t step, Operands& x, const Host& host) {
  for (int64_t p = 0; p < depths.size; p += step) {
    const Range depth{depths.begin + p, std::min(step, depths.size - p)};
    const Block& a = x.a.block(part.matrix, part.rows, depth, x.a_block, host);
    const Block& b = x.b.block(part.matrix, depth, part.columns, x.b_block, host);
    host.library_gemm({a.data, b.data, part.c, DType::f32, part.rows.size, part.columns.size,
                       depth.size, a.ld, b.ld, part.ldc, a.transposed, b.transposed,
                       part.adds || p > 0});
  }
}

// Lets each thread add up a share of k, and wait for no other.
Plan plan_shares(const GemmArgs& g, int64_t rows, int64_t columns, const Host& host) {
  const int64_t share = (g.k + host.threads() - 1) / host.threads();
  const int64_t shares = (g.k + share - 1) / share;
  const int64_t block_floats = (rows + columns) * kCachedExtent;
  const auto multiply = [=, &g, &host](const Part& part, float* workspace) {
    const int64_t n = part.columns.size, size = part.rows.size * n;
    float* const partial_sums = workspace + shares * block_floats;
    parallel(host, shares, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        Part own = part;
        if (i > 0) {
          own.c = partial_sums + (i - 1) * size;
          own.ldc = n;
          own.adds = false;
        }
        float* const blocks = workspace + i * block_floats;
        Operands operands{Widened(g.a), Widened(g.b), blocks, blocks + rows * kCachedExtent};
        const Range depths{i * share, std::min(share, g.k - i * share)};
        multiply_widened(own, depths, kCachedExtent, operands, host);
      }
    });
    parallel(host, part.rows.size, grain(kConvertGrain, n * shares),
             [&](int64_t begin, int64_t end) {
               for (int64_t r = begin; r < end; ++r) {
                 for (int64_t i = 1; i < shares; ++i) {
                   const float* const from = partial_sums + (i - 1) * size + r * n;
                   for (int64_t j = 0; j < n; ++j) part.c[r * part.ldc + j] += from[j];
                 }
               }
             });
  };
  return {rows, columns, shares * block_floats + (shares - 1) * rows * columns, multiply};
}

}  // namespace

Layout layout_of(const MatrixRef& x, int64_t rows, int64_t columns) {
  if (x.column_stride == 1 && (rows == 1 || x.row_stride >= columns))
    return {std::max(x.row_stride, columns), false};
  if (x.row_stride == 1 && (columns == 1 || x.column_stride >= rows))
    return {std::max(x.column_stride, rows), true};
  return {};
}

bool can_multiply_directly(const GemmArgs& g, const Host& host) {
  return host.has_16_bit_gemm && is_16_bit(g.a.dtype) && g.a.dtype == g.b.dtype &&
         layout_of(g.a, g.m, g.k).ld && layout_of(g.b, g.k, g.n).ld;
}

Plan plan_direct(const GemmArgs& g, const Host& host) {
  const Layout a = layout_of(g.a, g.m, g.k), b = layout_of(g.b, g.k, g.n);
  const auto multiply = [=, &g, &host](const Part& part, float*) {
    host.library_gemm({address(g.a, part.matrix, part.rows.begin, 0),
                       address(g.b, part.matrix, 0, part.columns.begin), part.c, g.a.dtype,
                       part.rows.size, part.columns.size, g.k, a.ld, b.ld, part.ldc, a.transposed,
                       b.transposed, part.adds});
  };
  return {std::min(g.m, kBlockExtent), std::min(g.n, kBlockExtent), 0, multiply};
}

Plan plan_widening(const GemmArgs& g, const Host& host) {
  const int64_t threads = host.threads();
  int64_t rows = std::min(g.m, kBlockExtent), columns = std::min(g.n, kBlockExtent), depth = g.k;
  if (depth > kMostDepth) {
    // Operands are widened again for each block of the other: rows and columns stay.
    const int64_t floats = rows * columns + (rows + columns) * kCachedExtent;
    if (threads > 1 && threads * floats <= kMostWorkspace && threads * kCachedExtent <= g.k)
      return plan_shares(g, rows, columns, host);
    depth = cached_extent(g.k, std::max(rows, columns), threads);
  } else {
    // One block of a stays widened for all columns, or one block of b for all rows.
    rows = cached_extent(g.m, g.k, threads);
    if (rows == g.m) columns = cached_extent(g.n, std::max(g.m, g.k), threads);
  }
  const auto multiply = [=, &g, &host, x = Operands{Widened(g.a), Widened(g.b), nullptr, nullptr}](
                            const Part& part, float* workspace) mutable {
    x.a_block = workspace;
    x.b_block = workspace + rows * depth;
    multiply_widened(part, {0, g.k}, depth, x, host);
  };
  return {rows, columns, (rows + columns) * depth, multiply};
}

}  // namespace amp_ext::cpu
