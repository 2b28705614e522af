// A block of each operand is packed by all threads, and then multiplied by all threads.
#include "isa/bf16.h"

#include "gemm/large.h"

namespace amp_ext::cpu {
namespace {

// Rows, columns and steps of k of a block. A panel of b stays in the first level of the cache while
// it is multiplied by panels of a, all of which stay in the second. The fewer rows and columns
// there are, the more steps: threads meet twice a block.
constexpr int64_t kRows = 64 * kBf16Rows, kColumns = 64 * kBf16Columns;
constexpr int64_t kElements = 1 << 20, kLeastSteps = 512, kMostSteps = 2048;

int64_t steps_of(int64_t rows, int64_t columns) {
  const int64_t lines = std::min(rows, kRows) + std::min(columns, kColumns);
  return std::clamp(kElements / lines / 2 * 2, kLeastSteps, kMostSteps);
}

// Pairs, and multiplications, that are worth waking a thread for.
constexpr int64_t kPackGrain = 1 << 14, kMultiplyGrain = 1 << 19;

// A panel of b by so many of a is a piece of work.
constexpr int64_t kGroup = 4;

constexpr uintptr_t kAlignment = 64;

uint32_t* aligned(float* workspace) {
  const auto address = reinterpret_cast<uintptr_t>(workspace);
  return reinterpret_cast<uint32_t*>((address + kAlignment - 1) / kAlignment * kAlignment);
}

constexpr int64_t panels(int64_t extent, int64_t width) { return (extent + width - 1) / width; }

// Rows of a, or columns of b, as the instructions take them: elements are `stride` apart, and steps
// of k `k_stride`.
struct Operand {
  const uint16_t* data;
  int64_t stride;
  int64_t k_stride;
  int width;
  void (*pack)(const Bf16PanelArgs&);

  void pack_panel(int64_t panel, Range extent, Range depth, uint32_t* to) const {
    const int64_t at = panel * width;
    pack({data + (extent.begin + at) * stride + depth.begin * k_stride, stride, k_stride,
          std::min<int64_t>(width, extent.size - at), depth.size,
          to + at * bf16_pairs(depth.size)});
  }
};

// c = alpha * (block of a) @ (block of b), or added to c.
void multiply_block(const uint32_t* a, const uint32_t* b, int64_t m, int64_t n, int64_t k, float* c,
                    int64_t ldc, float alpha, bool adds, const Host& host) {
  const int64_t pairs = bf16_pairs(k), groups = panels(m, kGroup * kBf16Rows);
  const int64_t count = panels(n, kBf16Columns) * groups;
  const int64_t work = kGroup * kBf16Rows * kBf16Columns * k;
  parallel(host, count, grain(kMultiplyGrain, work), [&](int64_t begin, int64_t end) {
    for (int64_t x = begin; x < end; ++x) {
      const int64_t j = x / groups * kBf16Columns, first = x % groups * kGroup * kBf16Rows;
      for (int64_t i = first; i < std::min(m, first + kGroup * kBf16Rows); i += kBf16Rows) {
        bf16_kernels()->multiply(
            {a + i * pairs, b + j * pairs, c + i * ldc + j, ldc, m - i, n - j, pairs, alpha, adds});
      }
    }
  });
}

}  // namespace

bool Bf16::can(const GemmArgs& g) {
  return multiplies_bf16() && g.a.dtype == DType::bf16 && g.b.dtype == DType::bf16;
}

int64_t Bf16::workspace() const {
  const int64_t rows = panels(std::min(rows_, kRows), kBf16Rows) * kBf16Rows;
  const int64_t columns = panels(std::min(columns_, kColumns), kBf16Columns) * kBf16Columns;
  return (rows + columns) * bf16_pairs(std::min(g_.k, steps_of(rows_, columns_))) +
         kAlignment / sizeof(float);
}

void Bf16::multiply(const Part& part, float* workspace, const Host& host) {
  const Bf16Kernels& kernels = *bf16_kernels();
  const auto at = [&](const MatrixRef& x, int64_t row, int64_t column) {
    return reinterpret_cast<const uint16_t*>(address(x, part.matrix, row, column));
  };
  const Operand a{at(g_.a, part.rows.begin, 0), g_.a.row_stride, g_.a.column_stride, kBf16Rows,
                  kernels.pack_a};
  const Operand b{at(g_.b, 0, part.columns.begin), g_.b.column_stride, g_.b.row_stride,
                  kBf16Columns, kernels.pack_b};
  const int64_t steps = steps_of(rows_, columns_);
  for (int64_t p = 0; p < g_.k; p += steps) {
    const Range depth{p, std::min(steps, g_.k - p)};
    const int64_t pack_grain = grain(kPackGrain, bf16_pairs(depth.size) * kBf16Columns);
    for (int64_t j = 0; j < part.columns.size; j += kColumns) {
      const Range columns{j, std::min(kColumns, part.columns.size - j)};
      const int64_t b_panels = panels(columns.size, kBf16Columns);
      uint32_t* const packed_b = aligned(workspace);
      uint32_t* const packed_a = packed_b + b_panels * kBf16Columns * bf16_pairs(depth.size);
      for (int64_t i = 0; i < part.rows.size; i += kRows) {
        const Range rows{i, std::min(kRows, part.rows.size - i)};
        const int64_t from_b = i == 0 ? b_panels : 0;
        const int64_t count = from_b + panels(rows.size, kBf16Rows);
        parallel(host, count, pack_grain, [&](int64_t begin, int64_t end) {
          for (int64_t x = begin; x < end; ++x) {
            x < from_b ? b.pack_panel(x, columns, depth, packed_b)
                       : a.pack_panel(x - from_b, rows, depth, packed_a);
          }
        });
        multiply_block(packed_a, packed_b, rows.size, columns.size, depth.size,
                       part.c + i * part.ldc + j, part.ldc, part.alpha, part.adds || p > 0, host);
      }
    }
  }
}

}  // namespace amp_ext::cpu
