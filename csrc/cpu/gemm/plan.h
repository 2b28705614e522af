// Declares the ways to compute matrix products.
#pragma once

#include <functional>

#include "gemm/operand.h"

namespace amp_ext::cpu {

// Extents of parts, measured. A part has at most kBlockExtent rows and columns. A greater k is cut.
constexpr int64_t kBlockExtent = 2048, kMostDepth = 1024;

// The most floats of operands widened as a whole, and of all shares' blocks and partial sums.
constexpr int64_t kMostWorkspace = 1 << 22;

// The layout of an operand with dense rows or columns. ld is 0 if neither are dense.
struct Layout {
  int64_t ld = 0;
  bool transposed = false;
};

Layout layout_of(const MatrixRef& x, int64_t rows, int64_t columns);

// A part of a result: c = (rows of a) @ (columns of b), or c += that, in fp32. c is row-major.
struct Part {
  int64_t matrix;  // index in the batches a and b
  Range rows;
  Range columns;
  float* c;
  int64_t ldc;
  bool adds;
};

// A way to compute one product in parts of bounded rows and columns.
struct Plan {
  int64_t rows;
  int64_t columns;
  int64_t workspace;  // the floats that multiply() needs, the same at each call
  std::function<void(const Part&, float* workspace)> multiply;
  // The row stride of c is a multiple of the first and at most the second.
  int64_t stride_unit = 1, most_stride = INT64_MAX;
};

// Widens blocks to fp32 for the library's GEMM.
Plan plan_widening(const GemmArgs& g, const Host& host);

// Passes 16-bit operands to the library's GEMM in place.
bool can_multiply_directly(const GemmArgs& g, const Host& host);
Plan plan_direct(const GemmArgs& g, const Host& host);

// Packs BF16 operands and multiplies them in blocks.
bool can_multiply_in_blocks(const GemmArgs& g, const Host& host);
Plan plan_blocks(const GemmArgs& g, const Host& host);

// Reads b once and widens it on the way, for has_few_rows().
Plan plan_few_rows(const GemmArgs& g, const Host& host);

}  // namespace amp_ext::cpu
