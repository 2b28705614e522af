// Plans for sm_90a that were measured to be the fastest for their products. They go before what the
// planner predicts.
#pragma once

#include <cstdint>
#include <span>

#include "amp_ext/gemm_plan_sm90.h"

namespace amp_ext {

// A product of one matrix and one term, and what is best for it: a tile and a cluster that serve
// it.
struct MeasuredPlan {
  int64_t m;
  int64_t n;
  int64_t k;
  Major a_major;
  Major b_major;
  int out_bytes;    // of an element
  bool accumulate;  // adds c
  Sm90Tile tile;
  int cluster_m;
  int cluster_n;
  int splits;  // of each tile of the last round, where that is not full
  int group;   // 0: the planner's
};

// None has been measured.
inline constexpr std::span<const MeasuredPlan> kMeasuredPlans{};

inline const MeasuredPlan* find_measured(std::span<const MeasuredPlan> measured,
                                         const GemmArgs& g) {
  if (measured.empty() || g.batch != 1 || g.terms != 1) return nullptr;
  const Major a_major = layout_of_a(g).major, b_major = layout_of_b(g).major;
  for (const MeasuredPlan& x : measured)
    if (x.m == g.m && x.n == g.n && x.k == g.k && x.a_major == a_major && x.b_major == b_major &&
        x.out_bytes == size_of(g.out.dtype) && x.accumulate == (g.c.data != nullptr))
      return &x;
  return nullptr;
}

// The number of a tile in kSm90Tiles, or -1.
constexpr int number_of(const Sm90Tile& tile) {
  for (int i = 0; i < kSm90TileCount; ++i) {
    const Sm90Tile& t = kSm90Tiles[i];
    if (t.m == tile.m && t.n == tile.n && t.ping_pong == tile.ping_pong) return i;
  }
  return -1;
}

// Whether the measured plan is one for these arguments: their result may need more memory.
inline bool measured_serves(const MeasuredPlan& x, const GemmArgs& g) {
  const int tile = number_of(x.tile);
  const int64_t steps = ceil_div(g.k, Sm90Tile::kStep) * g.terms;
  return tile >= 0 && sm90_tile_serves(g, kSm90Tiles[tile]) && x.splits <= steps;
}

inline GemmPlan plan_measured(const MeasuredPlan& x, const GemmArgs& g, int multiprocessors) {
  const int64_t clusters = sm90_clusters(x.cluster_m * x.cluster_n, multiprocessors);
  const int64_t tiles = g.batch * ceil_div(g.m, int64_t{x.tile.m} * x.cluster_m) *
                        ceil_div(g.n, int64_t{x.tile.n} * x.cluster_n);
  const auto whole = static_cast<uint32_t>(tiles / clusters * clusters);
  GemmPlan plan = plan_sm90_with(g, number_of(x.tile), x.cluster_m, x.cluster_n, whole, x.splits,
                                 multiprocessors);
  if (x.group > 0) plan.group = static_cast<uint32_t>(x.group);
  return plan;
}

}  // namespace amp_ext
