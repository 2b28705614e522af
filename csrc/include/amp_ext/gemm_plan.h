// The planner of the GEMM kernels: from the shape of a product to a kernel, a tile, splits and an
// order; and what a plan is predicted to take.
#pragma once

#include <cstdio>
#include <span>
#include <string>

#include "amp_ext/gemm_describe.h"
#include "amp_ext/gemm_measured.h"
#include "amp_ext/gemm_memory.h"
#include "amp_ext/gemm_model_sm90.h"
#include "amp_ext/gemm_plan_sm80.h"
#include "amp_ext/gemm_plan_sm90.h"
#include "amp_ext/gemm_serves.h"

namespace amp_ext {

struct GemmDevice {
  int multiprocessors;
  bool sm90;  // runs code for sm_90a, and the build has it
};

// Below this many predicted cycles, about 16 us, and where tiles are split, a plan for sm_90a is
// compared with one for mma.sync, which starts faster and whose tiles can be smaller.
constexpr double kSm90CertainCycles = 28000;

// The plan of a product that gemm_serves.
inline GemmPlan plan_gemm(const GemmArgs& g, const GemmDevice& device,
                          std::span<const MeasuredPlan> measured = kMeasuredPlans) {
  const int multiprocessors = device.multiprocessors;
  Sm90Choice sm90;
  if (device.sm90 && gemm_serves_sm90(g)) {
    const MeasuredPlan* const found = find_measured(measured, g);
    if (found && measured_serves(*found, g)) return plan_measured(*found, g, multiprocessors);
    sm90 = choose_sm90(g, multiprocessors);
  }
  const bool is_certain = sm90.tile >= 0 && sm90.splits == 1 && sm90.cycles >= kSm90CertainCycles;
  const Sm80Choice sm80 = is_certain ? Sm80Choice{} : choose_sm80(g, multiprocessors);
  if (sm90.tile >= 0 && sm90.cycles <= sm80.cycles)
    return plan_sm90_with(g, sm90.tile, sm90.cluster_m, sm90.cluster_n, sm90.whole, sm90.splits,
                          multiprocessors);
  return plan_with(g, sm80.tile, sm80.splits, multiprocessors);
}

// ---- predictions -------------------------------------------------------------------------------

struct GemmPrediction {
  double cycles = 0;
  double waves = 0;         // units, by how many of them are at work at a time
  double l2_bytes = 0;      // what multiprocessors read
  double memory_bytes = 0;  // what is read from memory or written
};

// What a plan for these arguments is predicted to take.
inline GemmPrediction predict(const GemmArgs& g, const GemmPlan& plan, const GemmDevice& device) {
  GemmPrediction result;
  if (plan.units == 0 || plan.steps == 0) return result;
  const int multiprocessors = device.multiprocessors;
  TileGrid grid;
  double shared = plan.splits > 1 ? double(plan.units / plan.splits) : 0;  // tiles in splits
  double computing;
  if (plan.sm90) {
    grid = sm90_grid(plan, multiprocessors);
    const int64_t tiles = g.batch * grid.tiles_m * grid.tiles_n;
    shared = double(tiles - plan.whole);
    const Sm90Cycles cycles(g, kSm90Tiles[plan.tile], plan.stages, plan.cluster_m, plan.cluster_n);
    computing = cycles.of(double(ceil_div(plan.whole, grid.together)), plan.splits);
  } else {
    const GemmTile& t = kGemmTiles[plan.tile];
    const double tiles = double(plan.units / plan.splits);
    grid = {t.m, t.n, plan.tiles_m, plan.tiles_n, int64_t{multiprocessors} * t.resident_blocks()};
    computing = ProductCycles(g, t, tiles, multiprocessors).with_splits(plan.splits);
  }
  result.waves = double(plan.units) / grid.together;
  // a is read for each column of tiles, b for each row; then the sums of shares, c and aux.
  result.l2_bytes =
      2.0 * g.k * g.terms * g.batch * (double(g.m) * grid.tiles_n + double(g.n) * grid.tiles_m) +
      shared * plan.splits * grid.m * grid.n * 4;
  if (g.c.data && !plan.reduce) result.l2_bytes += double(g.batch) * g.m * g.n * size_of(g.c.dtype);
  if (g.aux.data && g.derivative)
    result.l2_bytes += double(g.batch) * g.m * g.n * size_of(g.aux.dtype);
  result.memory_bytes = operand_bytes(g, grid, plan.group) + result_bytes(g);
  result.cycles = together_cycles(computing, result.memory_bytes);
  return result;
}

inline std::string describe(const GemmPrediction& x) {
  const auto number = [](double value, double unit) {
    char text[32];
    std::snprintf(text, sizeof(text), "%.2f", value / unit);
    return std::string(text);
  };
  return number(x.cycles, 1e3) + " thousand cycles, " + number(x.waves, 1) + " waves, " +
         number(x.l2_bytes, 1e6) + " MB from L2, " + number(x.memory_bytes, 1e6) +
         " MB from and to memory";
}

}  // namespace amp_ext
