// The GEMM kernel and its planner for Python, without torch; as simt_ops.cpp.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "gemm/plan/choose.h"
#include "gemm/shared/scheduler.cuh"

using namespace amp_ext;

extern "C" {

int simt_gemm_serves(const GemmArgs* args) { return can_run_sm80(*args); }

int simt_gemm_serves_sm90(const GemmArgs* args) { return can_run_sm90(*args); }

void simt_gemm_plan(const GemmArgs* args, int multiprocessors, bool sm90, GemmPlan* plan) {
  *plan = choose_plan(*args, {.multiprocessors = multiprocessors, .sm90 = sm90});
}

void simt_gemm_plan_with(const GemmArgs* args, int multiprocessors, int tile, int64_t splits,
                         GemmPlan* plan) {
  *plan = make_plan(*args, {.tile = tile, .splits = splits}, multiprocessors);
}

// Returns whether the tile can compute the product.
int simt_gemm_plan_sm90_with(const GemmArgs* args, int multiprocessors, int tile, int cluster_m,
                             int cluster_n, uint32_t whole, int64_t splits, GemmPlan* plan) {
  if (!kSm90Tiles[tile].serves(layout_of_b(*args).major)) return false;
  *plan = make_plan(*args, {true, tile, cluster_m, cluster_n, whole, splits}, multiprocessors);
  return true;
}

int simt_gemm_tiles(const GemmTile** tiles) {
  *tiles = kGemmTiles;
  return kGemmTileCount;
}

int simt_gemm_sm90_tiles(const Sm90Tile** tiles) {
  *tiles = kSm90Tiles;
  return kSm90TileCount;
}

void simt_gemm_describe(const GemmPlan* plan, char* text, size_t size) {
  strncpy(text, describe(*plan).c_str(), size - 1);
}

void simt_gemm_work(const GemmPlan* plan, GemmWork* work) {
  for (uint32_t unit = 0; unit < plan->units; ++unit) work[unit] = work_of(*plan, unit);
}

// Launches a plan with a workspace of NaN. Returns a Status, or -1 if a ticket is left.
int simt_gemm(const GemmArgs* args, const GemmPlan* plan) {
  std::vector<float4> workspace((plan->workspace_bytes + 15) / 16, {NAN, NAN, NAN, NAN});
  std::vector<uint32_t> tickets(plan->tickets);
  const Status status = cuda::launch_gemm(*args, *plan, workspace.data(), tickets.data(), {});
  const bool is_left = std::ranges::any_of(tickets, [](uint32_t ticket) { return ticket != 0; });
  return status == Status::ok && is_left ? -1 : static_cast<int>(status);
}

}  // extern "C"
