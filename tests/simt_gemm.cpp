// The GEMM kernel and its planner for Python, without torch; as simt_ops.cpp.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <vector>

#include "amp_ext/gemm_plan.h"
#include "gemm/shared/scheduler.cuh"

using namespace amp_ext;

extern "C" {

int simt_gemm_serves(const GemmArgs* args) { return gemm_serves(*args); }

int simt_gemm_serves_sm90(const GemmArgs* args) { return gemm_serves_sm90(*args); }

void simt_gemm_plan(const GemmArgs* args, int multiprocessors, bool sm90, GemmPlan* plan) {
  *plan = plan_gemm(*args, {multiprocessors, sm90});
}

// With measured plans of the caller's.
void simt_gemm_plan_measured(const GemmArgs* args, int multiprocessors, const MeasuredPlan* plans,
                             int count, GemmPlan* plan) {
  *plan = plan_gemm(*args, {multiprocessors, true}, {plans, static_cast<size_t>(count)});
}

int simt_gemm_measured_plans() { return static_cast<int>(kMeasuredPlans.size()); }

void simt_gemm_predict(const GemmArgs* args, const GemmPlan* plan, int multiprocessors,
                       GemmPrediction* prediction) {
  *prediction = predict(*args, *plan, {multiprocessors, plan->sm90});
}

// Microseconds a plan, of so many.
double simt_gemm_plan_time(const GemmArgs* args, int multiprocessors, bool sm90, int count) {
  const auto start = std::chrono::steady_clock::now();
  int tiles = 0;
  for (int i = 0; i < count; ++i) {
    GemmArgs again = *args;
    again.k += i % 2;  // so that nothing is known before
    tiles += plan_gemm(again, {multiprocessors, sm90}).tile;
  }
  const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - start;
  return tiles < 0 ? -1 : time.count() / count;
}

void simt_gemm_plan_with(const GemmArgs* args, int multiprocessors, int tile, int64_t splits,
                         GemmPlan* plan) {
  *plan = plan_with(*args, tile, splits, multiprocessors);
}

// Returns whether the tile serves the product.
int simt_gemm_plan_sm90_with(const GemmArgs* args, int multiprocessors, int tile, int cluster_m,
                             int cluster_n, uint32_t whole, int64_t splits, GemmPlan* plan) {
  if (!sm90_tile_serves(*args, kSm90Tiles[tile])) return false;
  *plan = plan_sm90_with(*args, tile, cluster_m, cluster_n, whole, splits, multiprocessors);
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
  const Status status = cuda::launch_gemm(*args, *plan, workspace.data(), tickets.data(), nullptr);
  const bool is_left = std::ranges::any_of(tickets, [](uint32_t ticket) { return ticket != 0; });
  return status == Status::ok && is_left ? -1 : static_cast<int>(status);
}

}  // extern "C"
