// Declares the launchers of the GEMM kernels: one per operand type, each compiled in its own file.
#pragma once

#include <utility>

#include "amp_ext/backend.h"
#include "gemm/plan/tiles.h"

namespace amp_ext {

using GemmLauncher = Status (*)(const GemmArgs&, const GemmPlan&, void* workspace,
                                uint32_t* tickets, cuda::Stream);

Status launch_gemm_f16(const GemmArgs&, const GemmPlan&, void*, uint32_t*, cuda::Stream);
Status launch_gemm_bf16(const GemmArgs&, const GemmPlan&, void*, uint32_t*, cuda::Stream);

// Exist in builds for sm_90a, which define AMP_EXT_SM90.
Status launch_gemm_sm90_f16(const GemmArgs&, const GemmPlan&, void*, uint32_t*, cuda::Stream);
Status launch_gemm_sm90_bf16(const GemmArgs&, const GemmPlan&, void*, uint32_t*, cuda::Stream);

// Launches the instance of a plan: Kernel::launch_one<kTile, kA, kB>.
template <class Kernel, int... kTiles>
Status launch_instance(std::integer_sequence<int, kTiles...>, const GemmArgs& args,
                       const GemmPlan& plan, void* workspace, uint32_t* tickets,
                       cuda::Stream stream) {
  constexpr Major k = Major::k, mn = Major::mn;
  constexpr GemmLauncher kLaunchers[][2][2] = {
      {{Kernel::template launch_one<kTiles, k, k>, Kernel::template launch_one<kTiles, k, mn>},
       {Kernel::template launch_one<kTiles, mn, k>,
        Kernel::template launch_one<kTiles, mn, mn>}}...};
  const GemmLauncher launcher = kLaunchers[plan.tile][plan.a_major == mn][plan.b_major == mn];
  return launcher(args, plan, workspace, tickets, stream);
}

}  // namespace amp_ext
