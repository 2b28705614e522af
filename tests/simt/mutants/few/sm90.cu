// Of the GEMM kernel for sm_90a an instance with a tile of either kind, and with each way in which
// an operand can lie, rows of 64 bytes too: see instances.h.
#include "gemm/sm90/gemm.cuh"
#include "instances.h"

namespace amp_ext {
namespace {

constexpr int kShared = 0, kNarrowRows = 4, kPingPong = 5;
static_assert(!kSm90Tiles[kShared].ping_pong && kSm90Tiles[kPingPong].ping_pong);
static_assert(kSm90Tiles[kNarrowRows].n == 160);
constexpr Major k = Major::k, mn = Major::mn;

}  // namespace

Status launch_gemm_sm90_f16(const GemmArgs& args, const GemmPlan& plan, void* workspace,
                            uint32_t* tickets, cuda::Stream stream) {
  return launch_one_of({{kShared, k, mn, launch_sm90_instance<__half, kShared, k, mn>},
                        {kNarrowRows, k, mn, launch_sm90_instance<__half, kNarrowRows, k, mn>}},
                       args, plan, workspace, tickets, stream);
}

Status launch_gemm_sm90_bf16(const GemmArgs& args, const GemmPlan& plan, void* workspace,
                             uint32_t* tickets, cuda::Stream stream) {
  return launch_one_of({{kPingPong, mn, k, launch_sm90_instance<__nv_bfloat16, kPingPong, mn, k>}},
                       args, plan, workspace, tickets, stream);
}

int active_sm90_clusters(int) { return 0; }

}  // namespace amp_ext
