// The GEMM kernel and its planner for Python, without torch; as simt_ops.cpp.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "amp_ext/gemm_plan.h"
#include "gemm/scheduler.cuh"

using namespace amp_ext;

extern "C" {

int simt_gemm_serves(const GemmArgs* args) { return gemm_serves(*args); }

// The planner's choice where `tile` is negative.
void simt_gemm_plan(const GemmArgs* args, int multiprocessors, int tile, int64_t splits,
                    GemmPlan* plan) {
  *plan = tile < 0 ? plan_gemm(*args, multiprocessors)
                   : plan_with(*args, tile, splits, multiprocessors);
}

int simt_gemm_tiles(const GemmTile** tiles) {
  *tiles = kGemmTiles;
  return kGemmTileCount;
}

void simt_gemm_describe(const GemmPlan* plan, char* text, size_t size) {
  strncpy(text, describe(*plan).c_str(), size - 1);
}

void simt_gemm_work(const GemmPlan* plan, GemmWork* work) {
  for (uint32_t block = 0; block < plan->blocks; ++block) work[block] = work_of(*plan, block);
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
