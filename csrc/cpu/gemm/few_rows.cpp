// Multiplies few rows. Threads share the columns, and each line of b is read once for all rows of
// a.
#include "gemm/plan.h"
#include "isa/rows.h"

namespace amp_ext::cpu {
namespace {

// Sums per thread at a time.
constexpr int64_t kSums = 4096;

// Up to kFewRows rows this code is the fastest (at 6 AMX takes 0.86 times as long). Without AMX and
// AVX512_BF16 more rows need kLeastColumns columns, or kLeastDepth steps of k for each row.
constexpr int64_t kFewRows = 4, kLeastColumns = 512, kLeastDepth = 128;

// Computes sums[r * ld + j] += a[r] . column j, for dense fp32 rows of a.
void add_columns(const GemmArgs& g, const Part& part, Range columns, const float* a, float* sums,
                 int64_t ld) {
  const RowKernels& kernels = row_kernels();
  const int type = static_cast<int>(g.b.dtype);
  const char* const from = address(g.b, part.matrix, 0, columns.begin);
  const auto* const b = reinterpret_cast<const uint16_t*>(from);
  const bool is_one_line = columns.size == 1 && g.b.row_stride == 1;
  if (g.b.column_stride == 1 && !is_one_line) {
    return kernels.add_multiples[type](
        {a, b, sums, g.k, g.b.row_stride, ld, part.rows.size, g.k, columns.size});
  }
  kernels.add_dots[type](
      {a, b, sums, g.k, g.b.column_stride, ld, part.rows.size, columns.size, g.k});
}

}  // namespace

bool has_few_rows(const GemmArgs& g, const Host& host) {
  const bool has_lines = g.b.column_stride == 1 || g.b.row_stride == 1;
  const bool beside_fast = has_tiles_of(g.b.dtype) || can_multiply_in_blocks(g, host);
  const int64_t most = beside_fast ? 0 : row_kernels().most_rows;
  const int64_t by_multiples = g.n < kLeastColumns ? 0 : most / 4;
  const int64_t limit = g.b.column_stride == 1 ? by_multiples : std::min(most, g.k / kLeastDepth);
  return g.m <= std::min(g.n, std::max(kFewRows, limit)) && has_lines &&
         g.m * g.k <= kMostWorkspace && is_16_bit(g.b.dtype);
}

Plan plan_few_rows(const GemmArgs& g, const Host& host) {
  const auto multiply = [&](const Part& part, float* workspace) {
    parallel(host, part.rows.size, grain(kConvertGrain, g.k), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        widen(address(g.a, part.matrix, part.rows.begin + r, 0), g.a.dtype, g.a.column_stride, g.k,
              workspace + r * g.k);
      }
    });
    parallel(host, part.columns.size, grain(kConvertGrain, g.k), [&](int64_t begin, int64_t end) {
      alignas(64) float sums[kSums];
      const int64_t ld = std::min(kSums / part.rows.size, end - begin);
      for (int64_t j = begin; j < end; j += ld) {
        const int64_t count = std::min(ld, end - j);
        std::fill_n(sums, part.rows.size * ld, 0.0f);
        add_columns(g, part, {part.columns.begin + j, count}, workspace, sums, ld);
        for (int64_t r = 0; r < part.rows.size; ++r) {
          float* const c = part.c + r * part.ldc + j;
          for (int64_t i = 0; i < count; ++i) {
            c[i] = (part.adds ? c[i] : 0) + sums[r * ld + i];
          }
        }
      }
    });
  };
  return {std::min(g.m, kBlockExtent), std::min(g.n, kBlockExtent), g.m * g.k, multiply};
}

}  // namespace amp_ext::cpu
