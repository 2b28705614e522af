// Maps a unit to a tile and to steps along k.
#pragma once

#include <cstdint>

#include "amp_ext/host_device.h"
#include "gemm/plan/tiles.h"

namespace amp_ext {

struct GemmWork {
  uint32_t tile;   // index among all tiles
  uint32_t share;  // index among the tile's shares
  int64_t batch;
  uint32_t m;  // row and column in the grid of tiles
  uint32_t n;
  int64_t matrix;  // matrix of a and b, and its step, at which the work begins
  int step;
  int steps;
};

// Returns the first step of a share, or the end of the last share. The first shares are one
// step longer if the steps do not divide evenly.
AMP_EXT_HOST_DEVICE inline int share_begin(int steps, uint32_t splits, uint32_t share) {
  const uint32_t each = steps / splits, longer = steps % splits;
  return static_cast<int>(share * each + (share < longer ? share : longer));
}

// Returns the work of a unit. Units run about in order of their index. Concurrent units compute
// `group` rows of tiles, column by column, so that they read few parts of a and b, which L2 then
// holds.
AMP_EXT_HOST_DEVICE inline GemmWork work_of(const GemmPlan& plan, uint32_t unit) {
  GemmWork work{.tile = unit / plan.splits, .share = unit % plan.splits};
  const int begin = share_begin(plan.steps, plan.splits, work.share);
  work.steps = share_begin(plan.steps, plan.splits, work.share + 1) - begin;
  const uint32_t tiles = plan.tiles_m * plan.tiles_n;
  work.batch = work.tile / tiles;
  const uint32_t in_matrix = work.tile % tiles;
  const uint32_t in_group = plan.group * plan.tiles_n;
  const uint32_t first = in_matrix / in_group * plan.group;
  const uint32_t left = plan.tiles_m - first;
  const uint32_t rows = left < plan.group ? left : plan.group;
  work.m = first + in_matrix % in_group % rows;
  work.n = in_matrix % in_group / rows;
  const int term = work.steps > 0 ? begin / plan.term_steps : 0;
  work.matrix = work.batch * plan.terms + term;
  work.step = begin - term * plan.term_steps;
  return work;
}

}  // namespace amp_ext
