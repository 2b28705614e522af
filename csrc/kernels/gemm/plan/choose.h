// Plans a product: chooses the tile and split with the fewest predicted cycles.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "amp_ext/gemm.h"
#include "gemm/plan/cost.h"
#include "gemm/plan/serves.h"
#include "gemm/plan/tiles.h"

namespace amp_ext {

// A tile and its predicted cycles.
struct GemmCandidate : GemmTileChoice {
  double cycles = INFINITY;
};

// Returns whether the sm_90a kernel can compute a product on a device.
inline bool may_run_sm90(const GemmArgs& g, const GemmDevice& device) {
  return device.sm90 && can_run_sm90(g);
}

constexpr int tile_count(bool sm90) { return sm90 ? kSm90TileCount : kGemmTileCount; }

// Calls visit(candidate) for each tile of a kernel, with the cheapest number of splits.
template <class Visit>
void for_each_candidate(const GemmArgs& g, const GemmDevice& device, bool sm90, Visit visit) {
  const bool aligned = layout_of_a(g).aligned && layout_of_b(g).aligned;
  for (int tile = 0; tile < tile_count(sm90); ++tile) {
    if (!sm90 && kGemmTiles[tile].aligned != aligned) continue;
    const GemmCost cost(g, sm90, tile, device.multiprocessors);
    GemmCandidate best;
    for (int64_t splits = 1; splits <= cost.most_splits(); ++splits)
      if (const double cycles = cost.cycles(splits); cycles < best.cycles)
        best = {{sm90, tile, splits}, cycles};
    visit(best);
  }
}

// The bases of the digits that encode a tile in GemmArgs::variant: the kernel and splits, in front
// of the tile.
constexpr int64_t kVariantKernels = 2, kVariantSplits = 256;
static_assert(kMostSplits < kVariantSplits);

// Encodes a tile; 0 for an invalid one.
inline int64_t variant_of(const GemmTileChoice& x) {
  const bool is_one =
      x.tile >= 0 && x.tile < tile_count(x.sm90) && x.splits >= 1 && x.splits < kVariantSplits;
  return is_one ? (x.tile * kVariantSplits + x.splits) * kVariantKernels + x.sm90 : 0;
}

inline std::optional<GemmTileChoice> tile_of_variant(int64_t variant) {
  if (variant <= 0) return std::nullopt;
  const int64_t digits = variant / kVariantKernels;
  const GemmTileChoice tile{.sm90 = variant % kVariantKernels != 0,
                            .tile = static_cast<int>(digits / kVariantSplits),
                            .splits = digits % kVariantSplits};
  return variant_of(tile) == variant ? std::optional(tile) : std::nullopt;
}

// Returns whether a tile can compute a product on a device.
inline bool can_run(const GemmArgs& g, const GemmDevice& device, const GemmTileChoice& x) {
  if (x.sm90) return may_run_sm90(g, device);
  const bool aligned = layout_of_a(g).aligned && layout_of_b(g).aligned;
  return aligned || !kGemmTiles[x.tile].aligned;
}

// Returns the tile of GemmArgs::variant, else the cheapest tile. At least one kernel can run the
// product. The sm_90a kernel computes all products that it can.
inline GemmCandidate choose(const GemmArgs& g, const GemmDevice& device) {
  if (const auto x = tile_of_variant(g.variant); x && can_run(g, device, *x))
    return {*x, GemmCost(g, x->sm90, x->tile, device.multiprocessors).cycles(x->splits)};
  GemmCandidate cheapest;
  for_each_candidate(g, device, may_run_sm90(g, device), [&](const GemmCandidate& x) {
    if (x.cycles < cheapest.cycles) cheapest = x;
  });
  return cheapest;
}

// Returns 0 and the cheapest tiles of both kernels besides choose(g, device), for
// Backend::gemm_variants.
inline std::vector<int64_t> plan_variants(const GemmArgs& g, const GemmDevice& device) {
  constexpr size_t kMost = 5;
  std::vector<GemmCandidate> all;
  const auto add = [&](const GemmCandidate& x) { all.push_back(x); };
  if (may_run_sm90(g, device)) for_each_candidate(g, device, true, add);
  for_each_candidate(g, device, false, add);
  std::ranges::sort(all, {}, &GemmCandidate::cycles);
  const int64_t chosen = variant_of(choose(g, device));
  std::vector<int64_t> variants{0};
  for (const GemmCandidate& x : all)
    if (variant_of(x) != chosen && variants.size() < kMost) variants.push_back(variant_of(x));
  return variants;
}

// Returns how many rows of tiles to compute together, column by column. Tiles of `at_a_time` blocks
// then form about a square, and read few rows of a and columns of b.
inline uint32_t group_rows(const TileExtents& t, int64_t tiles_m, int64_t at_a_time) {
  const double side = std::sqrt(double(at_a_time) * t.n / t.m);
  const auto group = static_cast<int64_t>(std::exp2(std::round(std::log2(side))));
  return static_cast<uint32_t>(std::clamp<int64_t>(group, 1, tiles_m));
}

// Divides shared memory between the boxes and stages of the sm_90a kernel.
inline void divide_memory(GemmPlan& plan, const GemmArgs& g, const Sm90Tile& t) {
  const int bytes = size_of(g.out.dtype);
  plan.reduce = adds_in_memory(g);
  plan.plain = is_plain(g);
  plan.box_columns = t.box_columns(plan.plain, bytes);
  const int box_bytes = Sm90Tile::kBoxRows * plan.box_columns * bytes;
  plan.boxes = t.boxes(plan.plain, box_bytes);
  plan.stages = t.stages(plan.boxes, box_bytes);
  plan.shared_bytes = t.shared_bytes(plan.stages, plan.boxes, box_bytes);
}

// Builds the plan of a tile that can compute the product.
inline GemmPlan make_plan(const GemmArgs& g, const GemmTileChoice& x, const GemmDevice& device) {
  GemmPlan plan;
  plan.sm90 = x.sm90;
  plan.tile = x.tile;
  plan.a_major = layout_of_a(g).major;
  plan.b_major = layout_of_b(g).major;
  if (g.m == 0 || g.n == 0 || g.batch == 0) return plan;

  const TileExtents t = extents(x.sm90, x.tile);
  plan.tiles_m = static_cast<uint32_t>(ceil_div(g.m, t.m));
  plan.tiles_n = static_cast<uint32_t>(ceil_div(g.n, t.n));
  plan.terms = static_cast<int>(g.terms);
  plan.term_steps = static_cast<int>(ceil_div(g.k, t.k));
  plan.steps = plan.term_steps * plan.terms;

  const int64_t tiles = g.batch * plan.tiles_m * plan.tiles_n;
  const int64_t splits = std::clamp<int64_t>(plan.steps, 1, x.splits);  // each has a step
  const int resident = x.sm90 ? 1 : kGemmTiles[x.tile].resident_blocks();
  const int64_t at_a_time = int64_t{device.multiprocessors} * resident;
  plan.splits = static_cast<uint32_t>(splits);
  plan.units = static_cast<uint32_t>(tiles * splits);
  plan.blocks = plan.units;
  if (x.sm90) plan.blocks = static_cast<uint32_t>(std::min<int64_t>(plan.units, at_a_time));
  plan.group = group_rows(t, plan.tiles_m, at_a_time);
  if (x.sm90) divide_memory(plan, g, kSm90Tiles[x.tile]);

  if (splits > 1) {
    const bool is_team = x.sm90 && !kSm90Tiles[x.tile].ping_pong;
    plan.workspace_bytes = plan.units * int64_t{t.m} * t.n * 4;
    plan.tickets = tiles * (is_team ? Sm90Tile::kConsumers : 1);
  }
  return plan;
}

inline GemmPlan choose_plan(const GemmArgs& g, const GemmDevice& device) {
  return make_plan(g, choose(g, device), device);
}

}  // namespace amp_ext
