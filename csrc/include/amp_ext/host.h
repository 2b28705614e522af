// What the CPU's backend needs of the program that it is loaded into.
#pragma once

#include <cstdint>

#include "amp_ext/dtype.h"

namespace amp_ext {

// Calls body(context, begin, end) for ranges that partition [0, count), on several threads when
// count > grain.
using ParallelBody = void (*)(void* context, int64_t begin, int64_t end);
using ParallelFor = void (*)(int64_t count, int64_t grain, void* context, ParallelBody body);

// c = a @ b, or c += a @ b when `accumulate`, row-major with leading dimensions; a is stored as
// k x m when `a_transposed`, b as n x k when `b_transposed`. Operands are of one dtype, sums FP32.
struct LibraryGemmArgs {
  const void* a;
  const void* b;
  float* c;
  DType dtype;
  int64_t m;
  int64_t n;
  int64_t k;
  int64_t lda;
  int64_t ldb;
  int64_t ldc;
  bool a_transposed;
  bool b_transposed;
  bool accumulate;
};

struct Host {
  ParallelFor parallel_for;
  void (*library_gemm)(const LibraryGemmArgs&);
  bool has_16_bit_gemm;                // library_gemm takes FP16 and BF16 operands too
  float* (*workspace)(int64_t count);  // the calling thread's own, valid until its next call
};

}  // namespace amp_ext
