// The CPU kernels as a backend.
#pragma once

#include "amp_ext/backend.h"

namespace amp_ext {

namespace cpu {

// Calls body(context, begin, end) for ranges that partition [0, count), on several threads when
// count > grain.
using ParallelBody = void (*)(void* context, int64_t begin, int64_t end);
using ParallelFor = void (*)(int64_t count, int64_t grain, void* context, ParallelBody body);

// c = alpha * a @ b, or c += that when `accumulate`, row-major with leading dimensions; a is stored
// as k x m when `a_transposed`, b as n x k when `b_transposed`.
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
  float alpha;
};

// What the kernels need of the host library.
struct CpuContext {
  ParallelFor parallel_for;
  void (*library_gemm)(const LibraryGemmArgs&);
  float* (*workspace)(int64_t count);  // the calling thread's own, valid until its next call
};

// Whether the processor has instructions for products of bf16.
bool multiplies_bf16();

// Whether a product is of so few rows that reading the other operand, of 16 bits, takes longest.
bool has_few_rows(const GemmArgs& g);

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(const CpuContext& context) : context_(context) {}

  const char* name() const override { return "cpu"; }
  AMP_EXT_LIST_OPS(AMP_EXT_OVERRIDE)
  const char* why_not(const GemmArgs&) const override;
  Status gemm(const GemmArgs&, Services&) const override;
  std::vector<int64_t> gemm_variants(const GemmArgs&, Services&) const override;

 private:
  CpuContext context_;
};

}  // namespace cpu

}  // namespace amp_ext
