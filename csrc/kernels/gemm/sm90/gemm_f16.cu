// Instantiates the sm_90a GEMM kernel for fp16.
#include "gemm.cuh"

namespace amp_ext {

Status launch_gemm_sm90_f16(const GemmArgs& args, const GemmPlan& plan, void* workspace,
                            uint32_t* tickets, cuda::Stream stream) {
  return launch_sm90<__half>(args, plan, workspace, tickets, stream);
}

}  // namespace amp_ext
