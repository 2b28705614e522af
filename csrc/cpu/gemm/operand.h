// Accesses the operands of a matrix product, and widens blocks of them to fp32.
#pragma once

#include <algorithm>
#include <cstring>

#include "backend.h"
#include "isa/span.h"
#include "parallel.h"

namespace amp_ext::cpu {

constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Elements that justify waking a thread for conversion only.
constexpr int64_t kConvertGrain = 1 << 16;

// Returns the grain of a loop in pieces of `each` elements, from a grain of `least` elements.
inline int64_t grain(int64_t least, int64_t each) {
  return std::max<int64_t>(1, least / std::max<int64_t>(1, each));
}

struct Range {
  int64_t begin;
  int64_t size;
};

inline const char* address(const MatrixRef& x, int64_t batch, int64_t row, int64_t column) {
  const int64_t index = batch * x.batch_stride + row * x.row_stride + column * x.column_stride;
  return static_cast<const char*>(x.data) + index * size_of(x.dtype);
}

inline const char* address(const VectorRef& x, int64_t index) {
  return static_cast<const char*>(x.data) + index * size_of(x.dtype);
}

// Widens n elements, `stride` apart, to fp32.
inline void widen(const char* from, DType dtype, int64_t stride, int64_t n, float* to) {
  if (n == 0) return;
  const auto convert = span_kernels().widen[static_cast<int>(dtype)];
  if (stride == 1) return convert(from, n, to);
  if (stride == 0) {
    convert(from, 1, to);
    return std::fill(to + 1, to + n, to[0]);
  }
  const int size = size_of(dtype);
  alignas(8) char line[64 * 8];
  for (int64_t i = 0; i < n; i += 64) {
    const int64_t count = std::min<int64_t>(64, n - i);
    for (int64_t j = 0; j < count; ++j) {
      std::memcpy(line + j * size, from + (i + j) * stride * size, size);
    }
    convert(line, count, to + i);
  }
}

// A block in fp32, row-major, or column-major if `transposed`.
struct Block {
  const float* data = nullptr;
  int64_t ld = 0;
  bool transposed = false;
};

// Widens blocks of one operand and caches the last one.
class Widened {
 public:
  explicit Widened(const MatrixRef& matrix) : matrix_(matrix) {}

  const Block& block(int64_t batch, Range rows, Range columns, float* buffer, const Host& host) {
    const char* const from = address(matrix_, batch, rows.begin, columns.begin);
    if (from == from_ && rows.size == rows_ && columns.size == columns_) return block_;
    from_ = from, rows_ = rows.size, columns_ = columns.size;
    const bool transposed = matrix_.column_stride != 1 && matrix_.row_stride == 1;
    const int64_t lines = transposed ? columns.size : rows.size;
    const int64_t length = transposed ? rows.size : columns.size;
    const int64_t line_stride = transposed ? matrix_.column_stride : matrix_.row_stride;
    const int64_t stride = transposed ? matrix_.row_stride : matrix_.column_stride;
    if (matrix_.dtype == DType::f32 && stride == 1 && line_stride >= length) {
      block_ = {reinterpret_cast<const float*>(from), line_stride, transposed};
      return block_;
    }
    block_ = {buffer, length, transposed};
    parallel(host, lines, grain(kConvertGrain, length), [&](int64_t begin, int64_t end) {
      const char* line = from + begin * line_stride * size_of(matrix_.dtype);
      float* to = buffer + begin * length;
      if (stride == 1 && line_stride == length) {
        return widen(line, matrix_.dtype, 1, (end - begin) * length, to);
      }
      for (int64_t i = begin; i < end; ++i, to += length) {
        widen(line, matrix_.dtype, stride, length, to);
        line += line_stride * size_of(matrix_.dtype);
      }
    });
    return block_;
  }

 private:
  const MatrixRef& matrix_;
  const char* from_ = nullptr;
  int64_t rows_ = 0;
  int64_t columns_ = 0;
  Block block_;
};

}  // namespace amp_ext::cpu
