// Defines the sm_80 GEMM kernel and launches its instances for one operand type.
#pragma once

#include <utility>

#include "epilogue.cuh"
#include "gemm/shared/instances.h"
#include "launch.cuh"
#include "mainloop.cuh"
#include "split.cuh"

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
  if (plan.splits > 1 &&
      !add_splits<Gemm>(sums, shared.epilogue.last, plan, work(), workspace, tickets))
    return;
  finish<Gemm>(sums, shared.epilogue, args, plan, work(), workspace, tickets);
}

template <class T, int kTileIndex, Major kA, Major kB>
Status launch_instance(const GemmArgs& args, const GemmPlan& plan, void* workspace,
                       uint32_t* tickets, cuda::Stream stream) {
  constexpr GemmTile kTile = kGemmTiles[kTileIndex];
  constexpr int kBytes = sizeof(GemmShared<GemmInstance<T, kTileIndex, kA, kB>>);
  static_assert(kBytes == kTile.shared_bytes(), "the planner's figure");
  constexpr auto kernel = gemm_kernel<T, kTileIndex, kA, kB>;
  if (allow_shared_bytes<kernel, kBytes>() != cudaSuccess) return Status::launch_failed;
  return launch(kernel, static_cast<int>(plan.blocks), kTile.threads(), kBytes, stream, args, plan,
                static_cast<unsigned char*>(workspace), tickets);
}

template <class T, int kTileIndex>
Status launch_tile(const GemmArgs& args, const GemmPlan& plan, void* workspace, uint32_t* tickets,
                   cuda::Stream stream) {
  constexpr Major k = Major::k, mn = Major::mn;
  const auto of_a_by_k = plan.b_major == k ? launch_instance<T, kTileIndex, k, k>
                                           : launch_instance<T, kTileIndex, k, mn>;
  const auto of_a_by_m = plan.b_major == k ? launch_instance<T, kTileIndex, mn, k>
                                           : launch_instance<T, kTileIndex, mn, mn>;
  return (plan.a_major == k ? of_a_by_k : of_a_by_m)(args, plan, workspace, tickets, stream);
}

// Returns the launcher of a tile for operands of type T.
template <class T, int... kTileIndices>
GemmLauncher tile_launcher(int tile, std::integer_sequence<int, kTileIndices...>) {
  constexpr GemmLauncher kLaunchers[] = {launch_tile<T, kTileIndices>...};
  return kLaunchers[tile];
}

template <class T>
Status launch_plan(const GemmArgs& args, const GemmPlan& plan, void* workspace, uint32_t* tickets,
                   cuda::Stream stream) {
  const auto launcher =
      tile_launcher<T>(plan.tile, std::make_integer_sequence<int, kGemmTileCount>{});
  return launcher(args, plan, workspace, tickets, stream);
}

}  // namespace amp_ext
