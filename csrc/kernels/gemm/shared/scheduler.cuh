// Which tile of the result a unit is, and which of its steps along k.
#pragma once

#include <cstdint>

#include "amp_ext/host_device.h"
#include "gemm/plan/tiles.h"

namespace amp_ext {

struct GemmWork {
  uint32_t tile;    // among all, for its ticket and its part of the workspace
  uint32_t split;   // of this tile
  uint32_t splits;  // that there are of it
  int64_t batch;
  uint32_t m;  // the tile's row and column in the grid of tiles
  uint32_t n;
  int64_t matrix;  // of a and b, in which the first of the steps along k is, and which of its steps
  int step;
  int steps;
};

// The first step of a share, or the end of the last one. The first shares are one step longer where
// they cannot all be equal.
AMP_EXT_HOST_DEVICE inline int share_begin(int steps, uint32_t splits, uint32_t split) {
  const uint32_t each = steps / splits, longer = steps % splits;
  return static_cast<int>(split * each + (split < longer ? split : longer));
}

// Units run about in order of their index. Those at work at the same time compute `group` rows of
// tiles, column by column, so that they read few different parts of a and b, which L2 then holds.
AMP_EXT_HOST_DEVICE inline GemmWork work_of(const GemmPlan& plan, uint32_t unit) {
  GemmWork work;
  const bool is_whole = unit < plan.whole;
  const uint32_t shared = is_whole ? 0 : unit - plan.whole;
  work.tile = is_whole ? unit : plan.whole + shared / plan.splits;
  work.split = shared % plan.splits;
  work.splits = is_whole ? 1 : plan.splits;
  const uint32_t tiles = plan.tiles_m * plan.tiles_n;
  work.batch = work.tile / tiles;
  const uint32_t in_matrix = work.tile % tiles;
  const uint32_t in_group = plan.group * plan.tiles_n;
  const uint32_t first = in_matrix / in_group * plan.group;
  const uint32_t left = plan.tiles_m - first;
  const uint32_t rows = left < plan.group ? left : plan.group;
  work.m = first + in_matrix % in_group % rows;
  work.n = in_matrix % in_group / rows;
  const int begin = share_begin(plan.steps, work.splits, work.split);
  work.steps = share_begin(plan.steps, work.splits, work.split + 1) - begin;
  const int term = work.steps > 0 ? begin / plan.term_steps : 0;
  work.matrix = work.batch * plan.terms + term;
  work.step = begin - term * plan.term_steps;
  return work;
}

}  // namespace amp_ext
