// Plans a product: chooses the tile and split with the fewest predicted cycles.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "amp_ext/gemm.h"
#include "gemm/plan/cost.h"
#include "gemm/plan/serves.h"
#include "gemm/plan/tiles.h"

namespace amp_ext {

struct GemmCandidate {
  bool sm90 = false;
  int tile = 0;
  int64_t whole = 0;
  int64_t splits = 1;
  Prediction predicted = INFINITY;

  bool is_cut() const { return splits != 1; }
};

inline bool may_run_sm90(const GemmArgs& g, const GemmDevice& device) {
  return device.sm90 && g.kernels.sm90 && can_run_sm90(g);
}

// The limit above which an uncut sm_90a candidate is chosen at once (about 16 us). Other candidates
// are compared with sm_80's, whose kernel starts faster and has smaller tiles.
constexpr double kSm90CertainCycles = 28000;

// Calls visit(candidate) for each tile, with the cheapest number of splits.
template <class Visit>
void each_sm80(const GemmArgs& g, int multiprocessors, Visit visit) {
  const bool aligned = layout_of_a(g).aligned && layout_of_b(g).aligned;
  for (int tile = 0; tile < kGemmTileCount; ++tile) {
    if (kGemmTiles[tile].aligned != aligned) continue;
    const Sm80Cost cost(g, kGemmTiles[tile], multiprocessors);
    if (cost.tiles > kGemmMostBlocks) continue;
    const int64_t most = cost.most_splits();
    GemmCandidate best;
    for (int64_t splits = 1; splits <= most; ++splits)
      if (const Prediction x = cost.predict(splits); x.cost < best.predicted.cost)
        best = {.tile = tile, .splits = splits, .predicted = x};
    visit(best);
  }
}

// Calls visit(candidate) for each tile, with the cheapest cut.
template <class Visit>
void each_sm90(const GemmArgs& g, int multiprocessors, Visit visit) {
  for (int tile = 0; tile < kSm90TileCount; ++tile) {
    const Sm90Cost cost(g, kSm90Tiles[tile], multiprocessors);
    GemmCandidate best;
    cost.each_cut([&](const Sm90Cut& cut) {
      const Prediction x = cost.predict(cut);
      if (x.cost < best.predicted.cost) best = {true, tile, cut.whole, cut.splits, x};
    });
    visit(best);
  }
}

// A tile set by the caller in place of the planner.
struct ForcedTile : GemmTileChoice {
  // The number of whole tiles, as in GemmPlan; -1 leaves it to the planner.
  int64_t whole = -1;
};

// The bases of the digits that encode a forced tile in GemmArgs::variant: the kernel and splits, in
// front of the tile.
constexpr int64_t kVariantKernels = 2, kVariantSplits = 256;
static_assert(kMostSplits < kVariantSplits);

// Encodes a tile; 0 for an invalid one.
inline int64_t variant_of(const GemmTileChoice& x) {
  const bool is_one = x.tile >= 0 && x.tile < (x.sm90 ? kSm90TileCount : kGemmTileCount) &&
                      x.splits >= 1 && x.splits < kVariantSplits;
  return is_one ? (x.tile * kVariantSplits + x.splits) * kVariantKernels + x.sm90 : 0;
}

// Encodes a candidate.
inline int64_t variant_of(const GemmCandidate& x) {
  return variant_of(GemmTileChoice{x.sm90, x.tile, x.splits});
}

inline std::optional<ForcedTile> tile_of_variant(int64_t variant) {
  if (variant <= 0) return std::nullopt;
  const int64_t digits = variant / kVariantKernels;
  const ForcedTile tile{{.sm90 = variant % kVariantKernels != 0,
                         .tile = static_cast<int>(digits / kVariantSplits),
                         .splits = digits % kVariantSplits}};
  return variant_of(tile) == variant ? std::optional(tile) : std::nullopt;
}

inline std::optional<GemmCandidate> forced_candidate(const GemmArgs& g, const GemmDevice& device,
                                                     const ForcedTile& forced) {
  GemmCandidate x{forced.sm90, forced.tile, std::max<int64_t>(forced.whole, 0), forced.splits};
  if (x.sm90) {
    if (!may_run_sm90(g, device)) return std::nullopt;
    const Sm90Cost cost(g, kSm90Tiles[x.tile], device.multiprocessors);
    if (forced.whole < 0) x.whole = (x.splits == 1 ? cost.uncut() : cost.equal(x.splits)).whole;
  } else if (!g.kernels.sm80 ||
             (kGemmTiles[x.tile].aligned && !(layout_of_a(g).aligned && layout_of_b(g).aligned))) {
    return std::nullopt;
  }
  return x;
}

// Returns the cheapest candidate. At least one kernel can run the product.
inline GemmCandidate choose(const GemmArgs& g, const GemmDevice& device) {
  if (const auto forced = tile_of_variant(g.variant))
    if (const auto candidate = forced_candidate(g, device, *forced)) return *candidate;
  GemmCandidate best;
  const auto consider = [&](const GemmCandidate& x) {
    if (x.predicted.cost < best.predicted.cost) best = x;
  };
  if (may_run_sm90(g, device)) {
    each_sm90(g, device.multiprocessors, consider);
    if (!best.is_cut() && best.predicted.cycles >= kSm90CertainCycles && best.sm90) return best;
  }
  if (g.kernels.sm80) each_sm80(g, device.multiprocessors, consider);
  return best;
}

// Returns 0 and the cheapest candidates besides choose(g, device), for Backend::gemm_variants.
inline std::vector<int64_t> plan_variants(const GemmArgs& g, const GemmDevice& device) {
  constexpr size_t kMost = 5;
  std::vector<GemmCandidate> all;
  const auto add = [&](const GemmCandidate& x) { all.push_back(x); };
  if (may_run_sm90(g, device)) each_sm90(g, device.multiprocessors, add);
  if (g.kernels.sm80) each_sm80(g, device.multiprocessors, add);
  std::ranges::sort(all, {}, [](const GemmCandidate& x) { return x.predicted.cost; });
  const int64_t chosen = variant_of(choose(g, device));
  std::vector<int64_t> variants{0};
  for (const GemmCandidate& x : all)
    if (variant_of(x) != chosen && variants.size() < kMost) variants.push_back(variant_of(x));
  return variants;
}

// Cuts the tail of a plan. Each share has at least one step.
inline void cut_tail(GemmPlan& plan, const GemmCandidate& x, int64_t tiles) {
  const int64_t splits = std::min<int64_t>(x.splits, plan.steps);
  int64_t tail = tiles - std::min(tiles, x.whole);
  if (splits <= 1) tail = 0;
  plan.whole = static_cast<uint32_t>(tiles - tail);
  plan.tail = static_cast<uint32_t>(tail);
  plan.splits = tail > 0 ? static_cast<uint32_t>(splits) : 1;
  plan.units = static_cast<uint32_t>(plan.whole + tail * splits);
}

// Builds the plan of a candidate that can compute the product.
inline GemmPlan make_plan(const GemmArgs& g, const GemmCandidate& x, const GemmDevice& device) {
  GemmPlan plan;
  plan.sm90 = x.sm90;
  plan.tile = x.tile;
  plan.a_major = layout_of_a(g).major;
  plan.b_major = layout_of_b(g).major;
  const bool is_empty = g.m == 0 || g.n == 0 || g.batch == 0;
  // Column sums over no elements are zeros, which a block must still write.
  if (is_empty && !(g.n > 0 && g.column_sums)) return plan;

  const GemmTile& sm80 = kGemmTiles[x.sm90 ? 0 : x.tile];
  const Sm90Tile& sm90 = kSm90Tiles[x.sm90 ? x.tile : 0];
  const int64_t tile_m = x.sm90 ? sm90.m : sm80.m, tile_n = x.sm90 ? sm90.n : sm80.n;
  const int64_t batch = std::max<int64_t>(g.batch, 1);
  plan.tiles_m = static_cast<uint32_t>(ceil_div(std::max<int64_t>(g.m, 1), tile_m));
  plan.tiles_n = static_cast<uint32_t>(ceil_div(std::max<int64_t>(g.n, 1), tile_n));
  plan.terms = static_cast<int>(g.terms);
  const int step = x.sm90 ? Sm90Tile::kStep : sm80.k;
  plan.term_steps = is_empty ? 0 : static_cast<int>(ceil_div(g.k, step));
  plan.steps = plan.term_steps * plan.terms;

  const int64_t tiles = batch * plan.tiles_m * plan.tiles_n;
  cut_tail(plan, x, tiles);
  const int64_t at_a_time = int64_t{device.multiprocessors} * (x.sm90 ? 1 : sm80.resident_blocks());
  plan.blocks = plan.units;
  if (x.sm90) plan.blocks = static_cast<uint32_t>(std::min<int64_t>(plan.units, at_a_time));
  plan.group = group_rows(g, plan, tile_m, tile_n, at_a_time);

  if (x.sm90) {
    const Sm90Memory memory = sm90_memory(g, sm90);
    plan.reduce = adds_in_memory(g);
    plan.plain = is_plain(g);
    plan.stages = memory.stages;
    plan.boxes = memory.boxes;
    plan.box_columns = memory.box_columns;
    plan.shared_bytes = memory.bytes;
  }

  const int64_t consumers = x.sm90 && !sm90.ping_pong ? Sm90Tile::kConsumers : 1;  // per tile
  plan.column_sums_offset = int64_t{plan.tail} * plan.splits * tile_m * tile_n * 4;
  plan.column_tickets = int64_t{plan.tail} * consumers;
  plan.workspace_bytes = plan.column_sums_offset;
  plan.tickets = plan.column_tickets;
  if (g.column_sums) {  // sm_90a: one row per 64 rows of a consumer
    const int64_t rows = x.sm90 ? ceil_div(g.m, Sm90Tile::kBoxRows) : plan.tiles_m;
    plan.workspace_bytes += batch * rows * plan.tiles_n * tile_n * 4;
    plan.tickets += plan.tiles_n;
  }
  return plan;
}

inline GemmPlan choose_plan(const GemmArgs& g, const GemmDevice& device) {
  return make_plan(g, choose(g, device), device);
}

// ---- description --------------------------------------------------------------------------------

inline std::string describe(const GemmTile& t) {
  return "tile " + std::to_string(t.m) + "x" + std::to_string(t.n) + "x" + std::to_string(t.k) +
         ", " + std::to_string(t.threads() / 32) + " warps, " + std::to_string(t.stages) +
         " stages, " + (t.aligned ? "16-byte loads" : "loads of single elements");
}

inline std::string describe(const Sm90Tile& t) {
  return "sm90 tile " + std::to_string(t.m) + "x" + std::to_string(t.n) + "x" +
         std::to_string(Sm90Tile::kStep) + (t.ping_pong ? ", ping-pong" : ", cooperative");
}

inline std::string describe(const GemmPlan& plan) {
  const auto major = [](Major m) { return m == Major::k ? "k" : "mn"; };
  const auto number = [](int64_t x) { return std::to_string(x); };
  std::string text = plan.sm90 ? describe(kSm90Tiles[plan.tile]) : describe(kGemmTiles[plan.tile]);
  if (plan.sm90)
    text += ", " + number(plan.stages) + " stages" + (plan.reduce ? ", added to out by TMA" : "");
  text += std::string("; a ") + major(plan.a_major) + "-major, b " + major(plan.b_major) +
          "-major; " + number(plan.tiles_m) + "x" + number(plan.tiles_n) + " tiles, ";
  if (plan.tail > 0 && plan.whole > 0) text += number(plan.whole) + " whole, the others in ";
  if (plan.tail > 0) text += number(plan.splits) + " splits, ";
  return text + number(plan.steps) + " steps, groups of " + number(plan.group) + " rows; " +
         number(plan.blocks) + " blocks; " + number(plan.workspace_bytes) + " bytes of workspace";
}

}  // namespace amp_ext
