// The matrix product of bf16 by the processor's instructions for it.
#pragma once

#include <cstdint>

namespace amp_ext::cpu {

// Operands are packed into panels: of a, kBf16Rows rows, of b, kBf16Columns columns. A panel has
// for every two steps of k one pair of elements for each of its rows or columns; pairs beyond the
// operand are 0.
constexpr int kBf16Rows = 12;
constexpr int kBf16Columns = 32;

constexpr int64_t bf16_pairs(int64_t k) { return (k + 1) / 2; }

// One panel. Element (i, p), row or column i at step p of k, is
// from[i * stride + p * k_stride]; count of them are the operand's.
struct Bf16PanelArgs {
  const uint16_t* from;
  int64_t stride;
  int64_t k_stride;
  int64_t count;
  int64_t k;
  uint32_t* to;
};

// c = alpha * (a panel of a @ a panel of b), or added to c, in fp32, where c has the rows and
// columns: panels may have more. (The instructions take subnormal numbers as 0, and return 0 for
// them.)
struct Bf16TileArgs {
  const uint32_t* a;
  const uint32_t* b;
  float* c;
  int64_t ldc;
  int64_t rows;
  int64_t columns;
  int64_t pairs;
  float alpha;
  bool adds;
};

struct Bf16Kernels {
  void (*pack_a)(const Bf16PanelArgs&);
  void (*pack_b)(const Bf16PanelArgs&);
  void (*multiply)(const Bf16TileArgs&);
};

// null where the processor has no such instructions.
const Bf16Kernels* bf16_kernels();

}  // namespace amp_ext::cpu
