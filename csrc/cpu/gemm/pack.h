// Copies of matrices of 16-bit elements, as the processor's instructions take them.
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

// to[i * ld + j] = element (i, j)
void copy_rows(const Matrix16& from, uint16_t* to, int64_t ld);

// to[(i / 2 * ld + j) * 2 + i % 2] = element (i, j); an odd number of rows is followed by zeros.
void copy_pairs(const Matrix16& from, uint16_t* to, int64_t ld);

}  // namespace amp_ext::cpu
