// Plans for the kernel for sm_90a: wgmma and TMA.
#pragma once

#include <algorithm>
#include <cstdint>

#include "amp_ext/gemm_memory.h"
#include "amp_ext/gemm_serves.h"

namespace amp_ext {

// ---- what a plan takes -------------------------------------------------------------------------

// Whether the memory system may add the product to out: nothing else is asked of the sums. (It may
// take FP32 numbers below 2^-126 for 0, as atomic additions do.)
inline bool adds_to_out(const GemmArgs& g) {
  return g.c.data && g.c.data == g.out.data && g.c.dtype == DType::f32 &&
         g.out.dtype == DType::f32 && (g.m <= 1 || g.c.row_stride == g.out.row_stride) &&
         (g.n <= 1 || g.c.column_stride == g.out.column_stride) &&
         (g.batch <= 1 || g.c.batch_stride == g.out.batch_stride) && g.beta == 1 && !g.aux.data &&
         g.activation == Activation::none && !g.derivative && !g.column_sums;
}

// The boxes of a consumer where nothing but the result goes through them.
constexpr int sm90_boxes(const Sm90Tile& t, int bytes) {
  return t.stages(3, bytes) == t.stages(2, bytes) ? 3 : 2;
}

// The boxes of a consumer: with more of them, what is fetched beside the product comes earlier, and
// a second result has its own. Every tile has room for four and three stages.
inline int sm90_boxes(const GemmArgs& g, const Sm90Tile& t) {
  const bool has_side = (g.c.data && !adds_to_out(g)) || g.aux.data;
  return has_side ? 4 : sm90_boxes(t, size_of(g.out.dtype));
}

// Whether a tile computes a product that gemm_serves_sm90.
inline bool sm90_tile_serves(const GemmArgs& g, const Sm90Tile& t) {
  return t.serves(layout_of_b(g).major);
}

// ---- plans -------------------------------------------------------------------------------------

// The clusters that work at a time.
inline int64_t sm90_clusters(int cluster_blocks, int multiprocessors) {
  return std::max(1, multiprocessors / cluster_blocks);
}

// The scheduler's tiles of a plan.
inline TileGrid sm90_grid(const GemmPlan& plan, int multiprocessors) {
  const Sm90Tile& t = kSm90Tiles[plan.tile];
  return {t.m * plan.cluster_m, t.n * plan.cluster_n, plan.tiles_m, plan.tiles_n,
          sm90_clusters(plan.cluster_m * plan.cluster_n, multiprocessors)};
}

// The plan with this tile and cluster, whose first `whole` tiles are one unit each and the others
// `splits`. The tile serves the product.
inline GemmPlan plan_sm90_with(const GemmArgs& g, int tile, int cluster_m, int cluster_n,
                               uint32_t whole, int64_t splits, int multiprocessors) {
  const Sm90Tile& t = kSm90Tiles[tile];
  const int cluster = cluster_m * cluster_n, bytes = size_of(g.out.dtype);
  GemmPlan plan;
  plan.sm90 = true;
  plan.tile = tile;
  plan.a_major = layout_of_a(g).major;
  plan.b_major = layout_of_b(g).major;
  plan.cluster_m = cluster_m;
  plan.cluster_n = cluster_n;
  plan.tiles_m = static_cast<uint32_t>(ceil_div(g.m, int64_t{t.m} * cluster_m));
  plan.tiles_n = static_cast<uint32_t>(ceil_div(g.n, int64_t{t.n} * cluster_n));
  plan.terms = static_cast<int>(g.terms);
  plan.term_steps = static_cast<int>(ceil_div(g.k, Sm90Tile::kStep));
  plan.steps = plan.term_steps * plan.terms;

  splits = std::min<int64_t>(splits, plan.steps);  // a share has a step at least
  const int64_t tiles = g.batch * plan.tiles_m * plan.tiles_n;
  const int64_t shared = splits > 1 ? tiles - std::min<int64_t>(tiles, whole) : 0;
  const int64_t units = tiles + shared * (splits - 1);
  plan.whole = static_cast<uint32_t>(tiles - shared);
  plan.splits = shared > 0 ? static_cast<uint32_t>(splits) : 1;
  plan.units = static_cast<uint32_t>(units);
  const int64_t clusters = std::min(units, sm90_clusters(cluster, multiprocessors));
  plan.blocks = static_cast<uint32_t>(clusters * cluster);
  plan.group = group_rows(g, sm90_grid(plan, multiprocessors));

  plan.reduce = adds_to_out(g);
  plan.boxes = sm90_boxes(g, t);
  plan.stages = t.stages(plan.boxes, bytes);
  plan.shared_bytes = t.shared_bytes(plan.stages, plan.boxes, bytes);

  const int64_t tile_consumers = t.ping_pong ? 1 : Sm90Tile::kConsumers;
  const int64_t width = int64_t{plan.tiles_n} * cluster_n;  // in tiles of a block
  if (shared > 0) {
    plan.column_sums_offset = shared * splits * cluster * t.m * t.n * 4;
    plan.column_tickets = shared * cluster * tile_consumers;
  }
  plan.workspace_bytes = plan.column_sums_offset;
  plan.tickets = plan.column_tickets;
  if (g.column_sums) {  // a row for each consumer's 64
    plan.workspace_bytes += g.batch * ceil_div(g.m, Sm90Tile::kBoxRows) * width * t.n * 4;
    plan.tickets += width;
  }
  return plan;
}

}  // namespace amp_ext
