// Declares the CPU backend's small matrix product and epilogues, compiled once per instruction set
// from tile.cpp.
#pragma once

#include <cstdint>

#include "amp_ext/gemm.h"

namespace amp_ext::cpu {

// The columns of a group, computed together.
constexpr int64_t kTileColumns = 32;

constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Computes c = a @ b in fp32. Element (i, p) of a is a[i * a_row + p * a_column]. b and c are
// row-major with leading dimension ldb, a multiple of kTileColumns.
struct TileArgs {
  const float* a;
  const float* b;
  float* c;
  int64_t m;
  int64_t k;
  int64_t a_row;
  int64_t a_column;
  int64_t ldb;
};

// Multiplies few rows of a with lines of b, which are its rows or columns.
//   add_dots: sums[r * sums_ld + l] += the sum of a[r * lda + i] * b[l * ldb + i] over i < n
//   add_multiples: sums[r * sums_ld + i] += the sum of a[r * lda + l] * b[l * ldb + i] over l <
//   lines
struct FewRowsArgs {
  const float* a;
  const uint16_t* b;
  float* sums;
  int64_t lda;
  int64_t ldb;
  int64_t sums_ld;
  int64_t rows;
  int64_t lines;
  int64_t n;
};

struct TileKernels {
  void (*multiply)(const TileArgs&);
  // The most rows for which the next two kernels beat widening all of b for a library. They widen a
  // line once for every two rows.
  int64_t most_rows;
  // Indexed by DType; null for types that are not of 16 bits.
  void (*add_dots[kDTypes])(const FewRowsArgs&);
  void (*add_multiples[kDTypes])(const FewRowsArgs&);
  // Computes values[i] = alpha * values[i] + beta * c[i] + bias[i]; c and bias may be null.
  void (*combine)(float* values, int64_t n, float alpha, float beta, const float* c,
                  const float* bias);
};

// Returns the kernels of the widest instruction set that this processor runs.
const TileKernels& tile_kernels();

}  // namespace amp_ext::cpu
