// Which units a worker computes, which tile of the result a unit is, and which of its steps along
// k.
#pragma once

#include <cstdint>

#include "amp_ext/host_device.h"
#include "gemm/plan/tiles.h"

namespace amp_ext {

// A unit, and of one that has steps of several tiles the piece that is one tile's.
struct GemmPlace {
  uint32_t unit;
  uint32_t piece = 0;
};

struct GemmWork {
  uint32_t tile;    // among all
  uint32_t share;   // of this tile
  uint32_t shares;  // that there are of it
  uint32_t slot;    // of its first share among all shares, if there are several
  int64_t batch;
  uint32_t m;  // the tile's row and column in the grid of tiles
  uint32_t n;
  int64_t matrix;  // of a and b, in which the first of the steps along k is, and which of its steps
  int step;
  int steps;
};

// The first step of an equal share, or the end of the last one. The first shares are one step
// longer where they cannot all be equal.
AMP_EXT_HOST_DEVICE inline int share_begin(int steps, uint32_t splits, uint32_t share) {
  const uint32_t each = steps / splits, longer = steps % splits;
  return static_cast<int>(share * each + (share < longer ? share : longer));
}

// The tail's last steps, numbered from one tile to the next, and their ranges.
class TailRests {
 public:
  AMP_EXT_HOST_DEVICE explicit TailRests(const GemmPlan& plan)
      : of_tile(plan.rest), steps_(uint64_t{plan.tail} * plan.rest), ranges_(plan.ranges) {}

  // The first step of a range, or the end of the last one.
  AMP_EXT_HOST_DEVICE uint64_t begin(uint32_t range) const { return range * steps_ / ranges_; }
  // The range in which a step is.
  AMP_EXT_HOST_DEVICE uint32_t range_of(uint64_t step) const {
    return static_cast<uint32_t>(((step + 1) * ranges_ - 1) / steps_);
  }
  AMP_EXT_HOST_DEVICE uint32_t first_range(uint32_t tile) const { return range_of(tile * of_tile); }
  AMP_EXT_HOST_DEVICE uint32_t last_range(uint32_t tile) const {
    return range_of((tile + 1) * of_tile - 1);
  }

  const uint64_t of_tile;

 private:
  const uint64_t steps_;
  const uint64_t ranges_;
};

AMP_EXT_HOST_DEVICE inline uint32_t first_range_unit(const GemmPlan& plan) {
  return plan.units - plan.ranges;
}

// To the next place of a worker, of which so many take the units by turns.
AMP_EXT_HOST_DEVICE inline void advance(GemmPlace& at, const GemmPlan& plan, uint32_t workers) {
  if (at.unit >= first_range_unit(plan)) {
    const TailRests rests(plan);
    const uint32_t range = at.unit - first_range_unit(plan);
    const uint64_t tile = rests.begin(range) / rests.of_tile + at.piece;
    if ((tile + 1) * rests.of_tile < rests.begin(range + 1)) {
      ++at.piece;
      return;
    }
  }
  at = {at.unit + workers};
}

// An equal share of a tile of the tail. Returns its first step along k.
AMP_EXT_HOST_DEVICE inline int find_equal_share(GemmWork& work, const GemmPlan& plan,
                                                uint32_t unit) {
  const uint32_t tile = (unit - plan.whole) / plan.splits;
  work.tile = plan.whole + tile;
  work.share = (unit - plan.whole) % plan.splits;
  work.shares = plan.splits;
  work.slot = tile * plan.splits;
  const int begin = share_begin(plan.steps - plan.rest, plan.splits, work.share);
  work.steps = share_begin(plan.steps - plan.rest, plan.splits, work.share + 1) - begin;
  return begin;
}

// The same of a piece of a range.
AMP_EXT_HOST_DEVICE inline int find_piece(GemmWork& work, const GemmPlan& plan, GemmPlace at) {
  const TailRests rests(plan);
  const uint32_t range = at.unit - first_range_unit(plan);
  const uint64_t from = rests.begin(range), to = rests.begin(range + 1);
  const uint32_t tile = static_cast<uint32_t>(from / rests.of_tile) + at.piece;
  work.tile = plan.whole + tile;
  work.share = plan.splits + range - rests.first_range(tile);
  work.shares = plan.splits;
  work.slot = tile * plan.splits;
  const uint64_t first = tile * rests.of_tile, behind = first + rests.of_tile;
  const int begin = at.piece == 0 ? static_cast<int>(from - first) : 0;
  work.steps = static_cast<int>((to < behind ? to : behind) - first) - begin;
  return plan.steps - plan.rest + begin;
}

// The shares behind a tile's equal ones: a range has one of each tile that it begins or goes on
// with, so that so many have their slots before this tile's.
AMP_EXT_HOST_DEVICE inline void add_ranges(GemmWork& work, const GemmPlan& plan) {
  const TailRests rests(plan);
  const uint32_t tile = work.tile - plan.whole, first = rests.first_range(tile);
  work.shares += rests.last_range(tile) - first + 1;
  work.slot += tile + first;
}

// Units run about in order of their index. Those at work at the same time compute `group` rows of
// tiles, column by column, so that they read few different parts of a and b, which L2 then holds.
template <bool kHasRanges = true>
AMP_EXT_HOST_DEVICE GemmWork work_of(const GemmPlan& plan, GemmPlace at) {
  GemmWork work{.tile = at.unit, .share = 0, .shares = 1, .slot = 0};
  work.steps = plan.steps;
  int begin = 0;
  if (kHasRanges && at.unit >= first_range_unit(plan))
    begin = find_piece(work, plan, at);
  else if (at.unit >= plan.whole)
    begin = find_equal_share(work, plan, at.unit);
  if (kHasRanges && plan.rest > 0 && work.tile >= plan.whole) add_ranges(work, plan);
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
