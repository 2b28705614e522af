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
// stored as k x m if `a_transposed`, b as n x k if `b_transposed`.
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

// The layout of b for the processor's 16-bit product instructions. `rows` is row-major; `pairs`
// puts element (p, j) of b at (p / 2 * ldb + j) * 2 + p % 2; `none` means no such instructions.
enum class BlockLayout : uint8_t { none, rows, pairs };

// Describes c = a @ b, or c += a @ b if `accumulate`, for one block in one thread. Operands are
// 16-bit, sums are FP32, and a and c are row-major. k is even if b is in pairs.
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
  void (*end_block_gemms)();           // releases the thread's tile registers, after its last block
  float* (*workspace)(int64_t count);  // thread-local memory, valid until the thread's next call
};

}  // namespace amp_ext
