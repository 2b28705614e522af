// Defines the sm_80 GEMM kernel and launches its instances for one operand type.
#pragma once

#include "epilogue.cuh"
#include "gemm/shared/instances.h"
#include "gemm/shared/split.cuh"
#include "launch.cuh"
#include "mainloop.cuh"
#include "reduce.cuh"

namespace amp_ext {

template <class Gemm>
union GemmShared {
  typename Gemm::Stage stages[Gemm::kTile.stages];
  EpilogueShared<Gemm> epilogue;
};

template <class T, int kTileIndex, Major kA, Major kB>
__global__ __launch_bounds__(
    kGemmTiles[kTileIndex].threads(),
    kGemmTiles[kTileIndex]
        .resident_blocks()) void gemm_kernel(const GemmArgs __grid_constant__ args,
                                             const GemmPlan __grid_constant__ plan,
                                             unsigned char* workspace, uint32_t* tickets) {
  using Gemm = GemmInstance<T, kTileIndex, kA, kB>;
  auto& shared = ptx::shared<GemmShared<Gemm>>();
  typename Gemm::Sums sums = {};
  // Each phase computes its work anew, since no phase has registers to spare.
  const auto work = [&] { return work_of(plan, ptx::block_index()); };
  accumulate<Gemm>(sums, shared.stages, args, plan, work());
  ptx::let_next_grid_begin();
  if (plan.splits > 1) {
    const GemmWork share = work();
    const auto is_last = [&] {
      ptx::block_sync();
      return is_last_block(tickets + share.tile, plan.splits, shared.epilogue.last);
    };
    if (!add_shares<Gemm::kTile.threads()>(sums, workspace, share.tile, share.share, plan.splits,
                                           threadIdx.x, is_last))
      return;
  }
  finish<Gemm>(sums, shared.epilogue, args, work());
}

template <class T>
struct Sm80Kernel {
  template <int kTileIndex, Major kA, Major kB>
  static Status launch_one(const GemmArgs& args, const GemmPlan& plan, void* workspace,
                           uint32_t* tickets, cuda::Stream stream) {
    constexpr GemmTile kTile = kGemmTiles[kTileIndex];
    constexpr int kBytes = sizeof(GemmShared<GemmInstance<T, kTileIndex, kA, kB>>);
    static_assert(kBytes == kTile.shared_bytes(), "the planner's figure");
    constexpr auto kernel = gemm_kernel<T, kTileIndex, kA, kB>;
    if (allow_shared_bytes<kernel, kBytes>() != cudaSuccess) return Status::launch_failed;
    return launch(kernel, static_cast<int>(plan.blocks), kTile.threads(), kBytes, stream, args,
                  plan, static_cast<unsigned char*>(workspace), tickets);
  }
};

template <class T>
Status launch_plan(const GemmArgs& args, const GemmPlan& plan, void* workspace, uint32_t* tickets,
                   cuda::Stream stream) {
  return launch_instance<Sm80Kernel<T>>(std::make_integer_sequence<int, kGemmTileCount>{}, args,
                                        plan, workspace, tickets, stream);
}

}  // namespace amp_ext
