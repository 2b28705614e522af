// Copies matrices of 16-bit elements into the layouts of the processor's instructions.
#pragma once

#include <cstdint>

namespace amp_ext::cpu {

// Element (i, j) is data[i * row_stride + j * column_stride].
struct Matrix16 {
  const uint16_t* data;
  int64_t row_stride;
  int64_t column_stride;
  int64_t rows;
  int64_t columns;
};

// Computes to[i * ld + j] = element (i, j).
void copy_rows(const Matrix16& from, uint16_t* to, int64_t ld);

// Computes to[(i / 2 * ld + j) * 2 + i % 2] = element (i, j). Zeros follow an odd number of rows.
void copy_pairs(const Matrix16& from, uint16_t* to, int64_t ld);

}  // namespace amp_ext::cpu
