// The CPU kernels: launchers allocate nothing and check nothing, the bindings have checked.
#pragma once

#include "amp_ext/gemm.h"
#include "amp_ext/lists.h"
#include "amp_ext/scale.h"
#include "amp_ext/status.h"

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

struct CpuContext {
  ParallelFor parallel_for;
  void (*library_gemm)(const LibraryGemmArgs&);
  float* (*workspace)(int64_t count);  // the calling thread's own, valid until its next call
};

// Whether the processor has instructions for products of bf16.
bool multiplies_bf16();

// Why torch's library is to compute a product, in a few words; null if launch_gemm is.
const char* gemm_obstacle(const GemmArgs&);

Status launch_unscale(const UnscaleArgs&, const CpuContext&);
Status launch_check_finite(const CheckFiniteArgs&, const CpuContext&);
Status launch_grad_norm(const GradNormArgs&, const CpuContext&);
Status launch_cast(const CastArgs&, const CpuContext&);
Status launch_update_scale(const UpdateScaleArgs&, const CpuContext&);
Status launch_gemm(const GemmArgs&, const CpuContext&);

}  // namespace cpu

}  // namespace amp_ext
