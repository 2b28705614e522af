// Declares the host functions that the CPU backend calls.
#pragma once

#include <cstdint>

#include "amp_ext/dtype.h"

namespace amp_ext {

// Calls body(context, begin, end) on ranges that partition [0, count). Several threads share the
// ranges if count > grain.
using ParallelBody = void (*)(void* context, int64_t begin, int64_t end);
using ParallelFor = void (*)(int64_t count, int64_t grain, void* context, ParallelBody body);

// Describes c = a @ b, or c += a @ b if `accumulate`, row-major with leading dimensions. a is
// stored as k x m if `a_transposed`, b as n x k if `b_transposed`. Operands have one dtype, sums
// are FP32.
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
  int64_t (*threads)();
  void (*library_gemm)(const LibraryGemmArgs&);
  bool has_16_bit_gemm;  // library_gemm also takes FP16 and BF16 operands
  // Returns whether block_gemm works; a user may turn it off.
  bool (*has_block_gemm)();
  // Multiplies BF16 on the calling thread, for an even k. a is stored as rows, b as pairs of rows:
  // element (p, j) is at (p / 2 * ldb + j) * 2 + p % 2.
  void (*block_gemm)(const LibraryGemmArgs&);
  float* (*workspace)(int64_t count);  // thread-local memory, valid until the thread's next call
};

}  // namespace amp_ext
