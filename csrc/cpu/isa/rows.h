// Declares the CPU backend's products of few rows and its epilogues, compiled once per instruction
// set from rows.cpp.
#pragma once

#include <cstdint>

#include "amp_ext/dtype.h"

namespace amp_ext::cpu {

// Multiplies few rows of a with lines of b, which are its rows or columns.
//   add_dots: sums[r * sums_ld + l] += the sum of a[r * lda + i] * b[l * ldb + i] over i < n
//   add_multiples: sums[r * sums_ld + i] += the sum of a[r * lda + l] * b[l * ldb + i] over l
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

struct RowKernels {
  // The most rows for which add_dots beats widening all of b for a library, for add_multiples a
  // quarter of it. They widen a line once for every two rows.
  int64_t most_rows;
  // Indexed by DType; null for types that are not of 16 bits.
  void (*add_dots[kDTypes])(const FewRowsArgs&);
  void (*add_multiples[kDTypes])(const FewRowsArgs&);
  // Computes values[i] = alpha * values[i] + beta * c[i] + bias[i]; c and bias may be null.
  void (*combine)(float* values, int64_t n, float alpha, float beta, const float* c,
                  const float* bias);
};

// Returns the kernels of the widest instruction set that this processor runs.
const RowKernels& row_kernels();

}  // namespace amp_ext::cpu
