// The planner of the GEMM kernel: from the shape of a product to a tile, splits and an order.
//
// Its figures are those of data sheets and of the kernel's own structure, and so are its choices
// predictions: none of them has been measured.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>

#include "amp_ext/gemm_tiles.h"
#include "amp_ext/launch.h"

namespace amp_ext {

constexpr int64_t ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }

// ---- what the kernel can do --------------------------------------------------------------------

// An operand as the kernel sees it: lines of contiguous elements. Strides of indices that have but
// one value mean nothing.
struct OperandLayout {
  bool served = false;
  Major major = Major::k;
  bool aligned = false;
};

inline OperandLayout layout_of(const MatrixRef& x, int64_t mn_stride, int64_t k_stride, int64_t mn,
                               int64_t k, int64_t matrices) {
  const auto as_major = [&](Major major) {
    const bool by_k = major == Major::k;
    const int64_t length = by_k ? k : mn, stride = by_k ? k_stride : mn_stride;
    const int64_t lines = by_k ? mn : k, line_stride = by_k ? mn_stride : k_stride;
    const bool aligned = reinterpret_cast<uintptr_t>(x.data) % 16 == 0 &&
                         (lines <= 1 || line_stride % 8 == 0) &&
                         (matrices <= 1 || x.batch_stride % 8 == 0);
    return OperandLayout{length <= 1 || stride == 1, major, aligned};
  };
  const OperandLayout by_k = as_major(Major::k), by_mn = as_major(Major::mn);
  if (by_k.served && (by_k.aligned || !by_mn.served || !by_mn.aligned)) return by_k;
  return by_mn;  // which may not be served either
}

inline OperandLayout layout_of_a(const GemmArgs& g) {
  return layout_of(g.a, g.a.row_stride, g.a.column_stride, g.m, g.k, g.batch * g.terms);
}

inline OperandLayout layout_of_b(const GemmArgs& g) {
  return layout_of(g.b, g.b.column_stride, g.b.row_stride, g.n, g.k, g.batch * g.terms);
}

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

constexpr int64_t kGemmMostBlocks = INT32_MAX;  // of a grid along x

inline bool writes_something(const GemmArgs& g) {
  return g.n > 0 && ((g.m > 0 && g.batch > 0) || g.column_sums);
}

// The plan with this tile and number of splits. Column sums of no rows at all are zeros, which
// blocks have to write that read nothing.
inline GemmPlan plan_with(const GemmArgs& g, int tile, int64_t splits, int multiprocessors) {
  const GemmTile& t = kGemmTiles[tile];
  GemmPlan plan;
  plan.tile = tile;
  plan.a_major = layout_of_a(g).major;
  plan.b_major = layout_of_b(g).major;
  if (!writes_something(g)) return plan;
  const int64_t batch = std::max<int64_t>(g.batch, 1);
  plan.tiles_m = static_cast<uint32_t>(ceil_div(std::max<int64_t>(g.m, 1), t.m));
  plan.tiles_n = static_cast<uint32_t>(ceil_div(g.n, t.n));
  plan.terms = static_cast<int>(g.terms);
  const bool has_rows = g.m > 0 && g.batch > 0;
  plan.term_steps = has_rows ? static_cast<int>(ceil_div(g.k, t.k)) : 0;
  plan.steps = plan.term_steps * plan.terms;
  plan.splits = static_cast<uint32_t>(splits);
  const int64_t tiles = batch * plan.tiles_m * plan.tiles_n;
  plan.blocks = static_cast<uint32_t>(tiles * splits);
  plan.group = group_rows(t, plan.tiles_m, plan.tiles_n, multiprocessors);
  if (splits > 1) {
    plan.column_sums_offset = tiles * splits * t.m * t.n * 4;
    plan.tickets = tiles;
  }
  plan.workspace_bytes = plan.column_sums_offset;
  if (g.column_sums) {
    plan.workspace_bytes += batch * plan.tiles_m * plan.tiles_n * t.n * 4;
    plan.tickets += plan.tiles_n;
  }
  return plan;
}

// Whether the kernel computes a product: what it does not serve is the library's.
inline bool gemm_serves(const GemmArgs& g) {
  const auto is_16_bit = [](DType dtype) { return dtype == DType::f16 || dtype == DType::bf16; };
  const auto is_served = [](const MatrixRef& x) { return !x.data || x.dtype != DType::f64; };
  const auto has_rows = [](const MatrixRef& x) { return !x.data || x.column_stride == 1; };
  // The smallest tile alone bounds the number of blocks.
  const double tiles = std::ceil(g.m / 64.0) * std::ceil(g.n / 64.0) * g.batch;
  const double steps = std::ceil(g.k / 32.0) * g.terms;  // at most; numbers of 32 bits count them
  return is_16_bit(g.a.dtype) && g.a.dtype == g.b.dtype && layout_of_a(g).served &&
         layout_of_b(g).served && g.out.dtype != DType::f64 && is_served(g.c) &&
         is_served(g.bias) && is_served(g.aux) && has_rows(g.out) && has_rows(g.aux) &&
         tiles <= kGemmMostBlocks && g.k <= INT32_MAX && g.terms <= INT32_MAX && steps <= INT32_MAX;
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

// The plan that is predicted to take the fewest cycles. The arguments are served.
inline GemmPlan plan_gemm(const GemmArgs& g, int multiprocessors) {
  const bool aligned = layout_of_a(g).aligned && layout_of_b(g).aligned;
  int best_tile = 0;
  int64_t best_splits = 1;
  double fewest = INFINITY;
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
      if (cycles < fewest) fewest = cycles, best_tile = tile, best_splits = splits;
    }
  }
  return plan_with(g, best_tile, best_splits, multiprocessors);
}

inline std::string describe(const GemmTile& t) {
  const auto number = [](int64_t x) { return std::to_string(x); };
  return "tile " + number(t.m) + "x" + number(t.n) + "x" + number(t.k) + ", " +
         number(t.threads() / 32) + " warps, " + number(t.stages) + " stages, " +
         (t.aligned ? "16-byte copies" : "single elements");
}

// What a block of the tile may take of a multiprocessor.
inline std::string describe_budget(const GemmTile& t) {
  const auto number = [](int64_t x) { return std::to_string(x); };
  return number(t.registers()) + " registers, " + number(t.shared_bytes()) +
         " bytes of shared memory, " + number(t.resident_blocks()) + " blocks at a time";
}

inline std::string describe(const GemmPlan& plan) {
  const auto major = [](Major m) { return m == Major::k ? "k" : "mn"; };
  const auto number = [](int64_t x) { return std::to_string(x); };
  return describe(kGemmTiles[plan.tile]) + "; a " + major(plan.a_major) + "-major, b " +
         major(plan.b_major) + "-major; " + number(plan.tiles_m) + "x" + number(plan.tiles_n) +
         " tiles, groups of " + number(plan.group) + ", " + number(plan.splits) + " splits of " +
         number(plan.steps) + " steps, " + number(plan.blocks) + " blocks; " +
         number(plan.workspace_bytes) + " bytes, " + number(plan.tickets) + " tickets";
}

}  // namespace amp_ext
