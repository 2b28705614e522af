// Instantiates the sm_90a GEMM kernel for fp16.
#include "gemm.cuh"

namespace amp_ext {

Status launch_gemm_sm90_f16(const GemmArgs& args, const GemmPlan& plan, void* workspace,
                            uint32_t* tickets, cuda::Stream stream) {
  return launch_sm90<__half>(args, plan, workspace, tickets, stream);
}

// Every instance gives the same number: one block fills a multiprocessor's shared memory.
int active_sm90_clusters(int blocks) {
  constexpr auto kernel = gemm_sm90_kernel<__half, 0, Major::k, Major::k>;
  return active_clusters<kernel, Sm90Tile::kSharedBytes>(blocks, Sm90Tile::kThreads);
}

}  // namespace amp_ext
