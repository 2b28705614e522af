// gemm: products of fp16 and bf16 on tensor cores. One launch.
#include "gemm.cuh"

namespace amp_ext {

Status cuda::launch_gemm(const GemmArgs& args, const GemmPlan& plan, void* workspace,
                         uint32_t* tickets, Stream stream) {
  if (plan.blocks == 0) return Status::ok;
  const auto launcher = args.a.dtype == DType::f16 ? launch_gemm_f16 : launch_gemm_bf16;
  return launcher(args, plan, workspace, tickets, stream);
}

}  // namespace amp_ext
