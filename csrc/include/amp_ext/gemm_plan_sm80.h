// Plans for the mma.sync kernel.
//
// Its figures are those of data sheets and of the kernel's own structure, and so are its choices
// predictions: none of them has been measured.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "amp_ext/gemm_serves.h"

namespace amp_ext {

// ---- what a tile costs -------------------------------------------------------------------------

// Of one multiprocessor, per cycle: sm_80's products on tensor cores, bytes of shared memory, its
// share of the bytes of L2; and the cycles until a load from device memory is there.
constexpr double kGemmProducts = 1024;
constexpr double kGemmSharedBytes = 128;
constexpr double kGemmL2Bytes = 40;
constexpr double kGemmLatency = 800;

// Splits have this many steps at least, so that their pipelines are full for most of the time.
constexpr int64_t kGemmStepsOfSplit = 4;
constexpr int64_t kGemmMostSplits = 64;

// A step's cycles when the multiprocessor is busy.
inline double step_cycles(const GemmTile& t) {
  const double products = double(t.m) * t.n * t.k / kGemmProducts;
  const double step_bytes = (t.m + t.n) * t.k * 2;
  const double fragment_bytes = (t.warp_m() + t.warp_n()) * t.k * 2.0 * t.warps_m * t.warps_n;
  const double shared = (step_bytes + fragment_bytes) / kGemmSharedBytes;
  // Loads of single elements: a warp's touches 16 sectors, of which L1 serves four in a cycle.
  const double loads = t.aligned ? step_bytes / kGemmL2Bytes : step_bytes / 2 / 32 * 4;
  return std::max({products, shared, loads});
}

// Steps along k, of all terms.
inline int64_t step_count(const GemmArgs& g, const GemmTile& t) {
  return ceil_div(g.k, t.k) * g.terms;
}

// Predicts the cycles of a product by one tile: each multiprocessor gets some rounds of blocks, as
// many at a time as fit. It takes as long as its tensor cores or its memory need, or as its blocks
// wait.
class ProductCycles {
 public:
  ProductCycles(const GemmArgs& g, const GemmTile& t, double tiles, int multiprocessors)
      : tiles_per_multiprocessor_(std::max(tiles, 1.0) / multiprocessors),
        resident_(t.resident_blocks()),
        steps_(step_count(g, t)),
        busy_step_(step_cycles(t)),
        waiting_step_(kGemmLatency / (t.stages - 1)) {
    int bytes = size_of(g.out.dtype);  // of an element of the result, and of what belongs to it
    if (g.c.data) bytes += size_of(g.c.dtype);
    if (g.aux.data) bytes += size_of(g.aux.dtype);
    const double elements = double(t.m) * t.n;
    finish_ = elements * bytes / kGemmL2Bytes;
    share_ = elements * 4 / kGemmL2Bytes;
  }

  double with_splits(int64_t splits) const {
    const double rounds = std::ceil(tiles_per_multiprocessor_ * splits);
    const double at_a_time = std::min(rounds, resident_);
    const double steps = std::ceil(steps_ / splits);
    const double busy = rounds * (steps * busy_step_ + finish_);
    const double waiting =
        std::ceil(rounds / at_a_time) * (steps * waiting_step_ + 2 * kGemmLatency + finish_);
    const double adding = share_ * (splits + 1) + 2 * kGemmLatency;
    return std::max(busy, waiting) + (splits > 1 ? adding : 0);
  }

 private:
  double tiles_per_multiprocessor_;
  double resident_;
  double steps_;
  double busy_step_;
  double waiting_step_;
  double finish_;  // cycles to write a tile's result
  double share_;   // to write or read a share of its sums
};

// The number of rows of tiles that blocks at work together should cover, for them to read the
// fewest different rows of a and columns of b.
inline uint32_t group_rows(const GemmTile& t, uint32_t tiles_m, uint32_t tiles_n,
                           int multiprocessors) {
  const int64_t together = int64_t{multiprocessors} * t.resident_blocks();
  uint32_t best = 1;
  int64_t fewest = INT64_MAX;
  for (uint32_t group = 1; group <= std::min(tiles_m, 64u); group *= 2) {
    const int64_t columns = std::min<int64_t>(tiles_n, ceil_div(together, group));
    const int64_t rows = std::min<int64_t>(tiles_m, ceil_div(together, columns));
    const int64_t lines = rows * t.m + columns * t.n;
    if (lines < fewest) fewest = lines, best = group;
  }
  return best;
}

// ---- plans -------------------------------------------------------------------------------------

inline bool writes_something(const GemmArgs& g) {
  return (g.m > 0 && g.n > 0 && g.batch > 0) || (g.n > 0 && g.column_sums);
}

// The plan with this tile and number of splits. Sums of no elements at all are zeros, which blocks
// have to write that read nothing.
inline GemmPlan plan_with(const GemmArgs& g, int tile, int64_t splits, int multiprocessors) {
  const GemmTile& t = kGemmTiles[tile];
  GemmPlan plan;
  plan.tile = tile;
  plan.a_major = layout_of_a(g).major;
  plan.b_major = layout_of_b(g).major;
  if (!writes_something(g)) return plan;
  const int64_t batch = std::max<int64_t>(g.batch, 1);
  plan.tiles_m = static_cast<uint32_t>(ceil_div(std::max<int64_t>(g.m, 1), t.m));
  plan.tiles_n = static_cast<uint32_t>(ceil_div(std::max<int64_t>(g.n, 1), t.n));
  plan.terms = static_cast<int>(g.terms);
  const bool is_empty = g.m == 0 || g.n == 0 || g.batch == 0;
  plan.term_steps = is_empty ? 0 : static_cast<int>(ceil_div(g.k, t.k));
  plan.steps = plan.term_steps * plan.terms;
  plan.splits = static_cast<uint32_t>(splits);
  const int64_t tiles = batch * plan.tiles_m * plan.tiles_n;
  plan.units = plan.blocks = static_cast<uint32_t>(tiles * splits);
  plan.group = group_rows(t, plan.tiles_m, plan.tiles_n, multiprocessors);
  if (splits > 1) {
    plan.column_sums_offset = tiles * splits * t.m * t.n * 4;
    plan.column_tickets = tiles;
  }
  plan.workspace_bytes = plan.column_sums_offset + (g.column_sums ? tiles * t.n * 4 : 0);
  plan.tickets = plan.column_tickets + (g.column_sums ? plan.tiles_n : 0);
  return plan;
}

// How many shares a tile's steps may be split into: one where there are tiles for all, else until
// there are two blocks for each that is at work at a time, so that the last ones leave few
// multiprocessors without work.
inline int64_t most_splits(const GemmArgs& g, const GemmTile& t, double tiles,
                           int multiprocessors) {
  if (tiles < 1 || tiles >= 2.0 * multiprocessors) return 1;
  const auto room = static_cast<int64_t>(2.0 * multiprocessors * t.resident_blocks() / tiles);
  const int64_t steps = step_count(g, t);
  return std::max<int64_t>(1, std::min({room, steps / kGemmStepsOfSplit, kGemmMostSplits}));
}

struct Sm80Choice {
  int tile = 0;
  int64_t splits = 1;
  double cycles = INFINITY;
};

// The choice that is predicted to take the fewest cycles. The arguments are served.
inline Sm80Choice choose_sm80(const GemmArgs& g, int multiprocessors) {
  const bool aligned = layout_of_a(g).aligned && layout_of_b(g).aligned;
  Sm80Choice best;
  for (int tile = 0; tile < kGemmTileCount; ++tile) {
    const GemmTile& t = kGemmTiles[tile];
    if (t.aligned != aligned) continue;
    const double tiles = std::ceil(double(g.m) / t.m) * std::ceil(double(g.n) / t.n) * g.batch;
    if (tiles > kGemmMostBlocks) continue;
    const ProductCycles predicted(g, t, tiles, multiprocessors);
    const int64_t most = most_splits(g, t, tiles, multiprocessors);
    for (int64_t splits = 1; splits <= most; ++splits) {
      double cycles = predicted.with_splits(splits);
      // Splits have to promise a tenth: they take memory, and their cost is the least certain.
      if (splits > 1) cycles /= 0.9;
      if (cycles < best.cycles) best = {tile, splits, cycles};
    }
  }
  return best;
}

}  // namespace amp_ext
