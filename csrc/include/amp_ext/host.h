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
// k x m when `a_transposed`, b as n x k when `b_transposed`.
struct LibraryGemmArgs {
  const float* a;
  const float* b;
  float* c;
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

// How the processor's instructions take b: rows, or pairs of rows, element (p, j) of b at
// (p / 2 * ldb + j) * 2 + p % 2. `none`: the processor has no instructions for the type.
enum class BlockLayout : uint8_t { none, rows, pairs };

// c = a @ b, or c += a @ b when `accumulate`: one block, in one thread, of two 16-bit operands with
// FP32 sums. a and c are row-major; k is even where b is in pairs.
struct BlockGemmArgs {
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
  bool accumulate;
};

struct Host {
  ParallelFor parallel_for;
  void (*library_gemm)(const LibraryGemmArgs&);
  BlockLayout (*block_layout)(DType);
  void (*block_gemm)(const BlockGemmArgs&);
  void (*end_block_gemms)();           // after the last ones of a thread, which hold its registers
  float* (*workspace)(int64_t count);  // the calling thread's own, valid until its next call
};

}  // namespace amp_ext
