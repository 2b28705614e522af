// Two instances of the GEMM kernel for sm_90a, which compile quickly, for mutants.py: of either
// kind of tile, and of either way in which an operand can lie.
#include "gemm/gemm_sm90.cuh"

namespace amp_ext {

Status cuda::launch_gemm(const GemmArgs& args, const GemmPlan& plan, void* workspace,
                         uint32_t* tickets, Stream stream) {
  constexpr int kShared = 0, kPingPong = 5;
  static_assert(!kSm90Tiles[kShared].ping_pong && kSm90Tiles[kPingPong].ping_pong);
  constexpr Major k = Major::k, mn = Major::mn;
  const bool half = args.a.dtype == DType::f16;
  const auto is = [&](int tile, Major a, Major b) {
    return plan.sm90 && plan.tile == tile && plan.a_major == a && plan.b_major == b;
  };
  if (half && is(kShared, k, mn))
    return launch_sm90_instance<__half, kShared, k, mn>(args, plan, workspace, tickets, stream);
  if (!half && is(kPingPong, mn, k))
    return launch_sm90_instance<__nv_bfloat16, kPingPong, mn, k>(args, plan, workspace, tickets,
                                                                 stream);
  return Status::launch_failed;
}

}  // namespace amp_ext
