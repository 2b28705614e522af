// gemm: products of fp16 and bf16 on tensor cores. One launch.
#include "gemm.cuh"

namespace amp_ext {

Status cuda::launch_gemm(const GemmArgs& args, const GemmPlan& plan, void* workspace,
                         uint32_t* tickets, Stream stream) {
  if (plan.blocks == 0) return Status::ok;
  // Of an index with a single value the stride means nothing: with 0, addresses that are formed but
  // not read are aligned too.
  GemmArgs g = args;
  if (g.m <= 1) g.a.row_stride = 0;
  if (g.n <= 1) g.b.column_stride = 0;
  if (g.k <= 1) g.a.column_stride = g.b.row_stride = 0;
  if (g.batch * g.terms <= 1) g.a.batch_stride = g.b.batch_stride = 0;
  const auto launcher = g.a.dtype == DType::f16 ? launch_gemm_f16 : launch_gemm_bf16;
  return launcher(g, plan, workspace, tickets, stream);
}

}  // namespace amp_ext
