// Maps a worker to its units, and a unit to a tile and to steps along k.
#pragma once

#include <cstdint>

#include "amp_ext/host_device.h"
#include "gemm/plan/tiles.h"

namespace amp_ext {

// A unit, and the piece within a range: a range has one piece per tile it touches.
struct GemmPlace {
  uint32_t unit;
  uint32_t piece = 0;
};

struct GemmWork {
  uint32_t tile;    // index among all tiles
  uint32_t share;   // index among the tile's shares
  uint32_t shares;  // number of the tile's shares
  uint32_t slot;    // workspace index of the tile's first share, if there are several
  int64_t batch;
  uint32_t m;  // row and column in the grid of tiles
  uint32_t n;
  int64_t matrix;  // matrix of a and b, and its step, at which the work begins
  int step;
  int steps;
};

// Returns the first step of an equal share, or the end of the last share. The first shares are one
// step longer if the steps do not divide evenly.
AMP_EXT_HOST_DEVICE inline int share_begin(int steps, uint32_t splits, uint32_t share) {
  const uint32_t each = steps / splits, longer = steps % splits;
  return static_cast<int>(share * each + (share < longer ? share : longer));
}

// The tail's last steps, numbered across tiles, and their ranges.
class TailRests {
 public:
  AMP_EXT_HOST_DEVICE explicit TailRests(const GemmPlan& plan)
      : of_tile(plan.rest), steps_(uint64_t{plan.tail} * plan.rest), ranges_(plan.ranges) {}

  // Returns the first step of a range, or the end of the last range.
  AMP_EXT_HOST_DEVICE uint64_t begin(uint32_t range) const { return range * steps_ / ranges_; }
  // Returns the range of a step.
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

// Advances to the worker's next place. Workers take units in turn.
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

// Fills in an equal share of a tail tile, and returns its first step along k.
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

// Fills in a piece of a range, and returns its first step along k.
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

// Adds the range shares of a tile to its equal ones. Each range has one share of each tile it
// touches, which shifts the slots of later tiles.
AMP_EXT_HOST_DEVICE inline void add_ranges(GemmWork& work, const GemmPlan& plan) {
  const TailRests rests(plan);
  const uint32_t tile = work.tile - plan.whole, first = rests.first_range(tile);
  work.shares += rests.last_range(tile) - first + 1;
  work.slot += tile + first;
}

// Returns the work of a place. Units run about in order of their index. Concurrent units compute
// `group` rows of tiles, column by column, so that they read few parts of a and b, which L2 then
// holds.
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
