// Defines the arguments of the matrix products. Pointers are device or host pointers as in lists.h.
#pragma once

#include <cstdint>

#include "amp_ext/dtype.h"

namespace amp_ext {

// A batch of matrices in any layout: element (b, i, j) is data[b * batch_stride + i * row_stride +
// j * column_stride]. A stride of 0 broadcasts.
struct MatrixRef {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t batch_stride = 0;
  int64_t row_stride = 0;
  int64_t column_stride = 0;

  bool operator==(const MatrixRef&) const = default;
};

// A contiguous vector.
struct VectorRef {
  void* data = nullptr;
  DType dtype = DType::f32;

  bool operator==(const VectorRef&) const = default;
};

// Describes out = alpha * a @ b + beta * c + bias with fp32 accumulation; a and b are not fp64.
// Matrix i of out is the sum of the products i * terms, ..., (i + 1) * terms - 1 of a and b.
struct GemmArgs {
  MatrixRef a;     // m x k
  MatrixRef b;     // k x n
  MatrixRef c;     // m x n; data may be null if beta is 0, or out's if c has out's layout
  MatrixRef out;   // m x n, column_stride 1
  VectorRef bias;  // n, added to every row; data may be null
  int64_t batch;
  int64_t terms;
  int64_t m;
  int64_t n;
  int64_t k;
  double alpha;
  double beta;
  // Selects one of GemmBackend::gemm_variants; 0 lets the backend choose.
  int64_t variant = 0;

  bool operator==(const GemmArgs&) const = default;
};

// Returns whether a product is added to out in memory.
inline bool adds_to_out(const GemmArgs& g) { return g.c.data && g.c.data == g.out.data; }

// A tile set by verification, tests or tools in place of the planner.
struct GemmTileChoice {
  bool sm90 = false;  // selects the kernels for sm_90a, else those for sm_80
  int tile = 0;       // index among the kernel's tiles
  int64_t splits = 1;
};

}  // namespace amp_ext
