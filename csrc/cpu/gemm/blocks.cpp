// Multiplies 16-bit operands by the processor's 16-bit instructions. Threads pack steps of k of
// both operands, then multiply tiles of the result.
#include "gemm/large.h"
#include "gemm/pack.h"
#include "isa/tile.h"

namespace amp_ext::cpu {
namespace {

// A tile of the result. Its block of a and its panel of b stay in the L2 cache.
constexpr int64_t kRows = 64, kColumns = 64;

// Limits on the steps of k at a time. Fewer rows and columns allow more steps, since threads
// synchronise twice per iteration.
constexpr int64_t kElements = 1 << 20, kLeastSteps = 512, kMostSteps = 2048;

// Blocks have a multiple of this many steps, and packed operands are padded with zeros: oneDNN
// generates and keeps code for each k.
constexpr int64_t kStepUnit = 64;

// Padding between packed rows of a, in elements. Rows a power of two apart would evict each other.
constexpr int64_t kRowPadding = 32;

// Elements to pack, and multiplications, that justify waking a thread.
constexpr int64_t kPackGrain = 1 << 14, kMultiplyGrain = 1 << 19;

constexpr uintptr_t kAlignment = 64;

constexpr int64_t pieces(int64_t extent, int64_t size) { return (extent + size - 1) / size; }

uint16_t* aligned(float* workspace) {
  const auto address = reinterpret_cast<uintptr_t>(workspace);
  return reinterpret_cast<uint16_t*>((address + kAlignment - 1) / kAlignment * kAlignment);
}

const uint16_t* elements(const MatrixRef& x, int64_t matrix, int64_t row, int64_t column) {
  return reinterpret_cast<const uint16_t*>(address(x, matrix, row, column));
}

bool has_rows(const MatrixRef& x, int64_t rows, int64_t columns) {
  return x.column_stride == 1 && (rows == 1 || x.row_stride >= columns);
}

}  // namespace

bool Blocks::can(const GemmArgs& g, const Host& host) {
  return g.a.dtype == g.b.dtype && host.block_layout(g.a.dtype) != BlockLayout::none;
}

Blocks::Blocks(const GemmArgs& g, const Host& host, int64_t rows, int64_t columns)
    : g_(g), layout_(host.block_layout(g.a.dtype)), rows_(rows), columns_(columns) {
  const bool is_whole = g.k % kStepUnit == 0;
  packs_a_ = !is_whole || !has_rows(g.a, g.m, g.k);
  packs_b_ = !is_whole || layout_ == BlockLayout::pairs || !has_rows(g.b, g.k, g.n);
  const int64_t steps = kElements / (rows + columns) / kStepUnit * kStepUnit;
  steps_ = std::min(round_up(g.k, kStepUnit), std::clamp(steps, kLeastSteps, kMostSteps));
}

int64_t Blocks::workspace() const {
  const int64_t a = packs_a_ ? rows_ * (steps_ + kRowPadding) : 0;
  const int64_t b = packs_b_ ? round_up(columns_, kColumns) * steps_ : 0;
  return (a + b) / 2 + 1 + kAlignment / sizeof(float);
}

void Blocks::multiply(const Part& part, float* workspace, const Host& host) {
  uint16_t* const packed_b = aligned(workspace);
  uint16_t* const packed_a = packed_b + (packs_b_ ? round_up(columns_, kColumns) * steps_ : 0);
  const int64_t panels = pieces(part.columns.size, kColumns);
  const int64_t groups = pieces(part.rows.size, kRows);
  const int64_t lda = packs_a_ ? steps_ + kRowPadding : std::max(g_.a.row_stride, g_.k);
  const int64_t ldb = packs_b_ ? kColumns : std::max(g_.b.row_stride, g_.n);
  const int64_t ldc = std::max(part.ldc, part.columns.size);

  for (int64_t p = 0; p < g_.k; p += steps_) {
    const int64_t steps = std::min(steps_, g_.k - p), k = round_up(steps, kStepUnit);
    const auto pack_a = [&](int64_t group) {
      const int64_t i = group * kRows, rows = std::min(kRows, part.rows.size - i);
      uint16_t* const to = packed_a + i * lda;
      copy_rows({elements(g_.a, part.matrix, part.rows.begin + i, p), g_.a.row_stride,
                 g_.a.column_stride, rows, steps},
                to, lda);
      for (int64_t r = 0; r < rows; ++r) std::fill(to + r * lda + steps, to + r * lda + k, 0);
    };
    const auto pack_b = [&](int64_t panel) {
      const int64_t j = panel * kColumns, columns = std::min(kColumns, part.columns.size - j);
      uint16_t* const to = packed_b + j * k;
      const Matrix16 from{elements(g_.b, part.matrix, p, part.columns.begin + j), g_.b.row_stride,
                          g_.b.column_stride, steps, columns};
      const bool in_pairs = layout_ == BlockLayout::pairs;
      in_pairs ? copy_pairs(from, to, kColumns) : copy_rows(from, to, kColumns);
      std::fill(to + round_up(steps, in_pairs ? 2 : 1) * kColumns, to + k * kColumns, 0);
    };
    const int64_t from_b = packs_b_ ? panels : 0, from_a = packs_a_ ? groups : 0;
    parallel(host, from_b + from_a, grain(kPackGrain, k * kColumns),
             [&](int64_t begin, int64_t end) {
               for (int64_t x = begin; x < end; ++x) x < from_b ? pack_b(x) : pack_a(x - from_b);
             });

    const uint16_t* const a = packs_a_ ? packed_a : elements(g_.a, part.matrix, part.rows.begin, p);
    const uint16_t* const b =
        packs_b_ ? packed_b : elements(g_.b, part.matrix, p, part.columns.begin);
    parallel(
        host, panels * groups, grain(kMultiplyGrain, kRows * kColumns * k),
        [&](int64_t begin, int64_t end) {
          for (int64_t x = begin; x < end; ++x) {
            const int64_t j = x / groups * kColumns, i = x % groups * kRows;
            host.block_gemm({a + i * lda, b + (packs_b_ ? j * k : j), part.c + i * part.ldc + j,
                             g_.a.dtype, std::min(kRows, part.rows.size - i),
                             std::min(kColumns, part.columns.size - j), k, lda, ldb, ldc,
                             part.adds || p > 0});
          }
          host.end_block_gemms();
        });
  }
}

}  // namespace amp_ext::cpu
