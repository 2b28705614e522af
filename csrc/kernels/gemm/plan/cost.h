// Predicts the cycles of a product, for a tile and a cut of the tiles along k.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "gemm/plan/serves.h"

namespace amp_ext {

// A kernel's rates on one multiprocessor, per cycle. The rates for sm_90a are from an H100 under
// its power limit, for plain results (is_plain); others take longer. The rates for sm_80 are
// guesses.
struct GemmRates {
  double multiply_adds;    // of 16-bit operands
  double operand_bytes;    // a and b, from L2 to registers
  double result_bytes;     // out and c
  double next_tile;        // cycles to find the next tile
  int64_t steps_of_share;  // the fewest along k
};
constexpr GemmRates kSm80Rates{1024, 40, 40, 0, 4};
constexpr GemmRates kSm90Rates{1740, 51, 18, 450, 8};

// Bytes per cycle of a share's sums, stored or added: a guess.
constexpr double kShareBytes = 40;

constexpr int64_t kMostSplits = 64;

// Predicts a tile. Rounds of tiles take the time of their steps along k and of their epilogues.
class GemmCost {
 public:
  GemmCost(const GemmArgs& g, bool sm90, int tile, int multiprocessors)
      : rates_(sm90 ? kSm90Rates : kSm80Rates),
        ping_pong_(sm90 && kSm90Tiles[tile].ping_pong),
        multiprocessors_(multiprocessors) {
    const TileExtents t = extents(sm90, tile);
    tiles_ = g.batch * ceil_div(g.m, t.m) * ceil_div(g.n, t.n);
    steps_ = ceil_div(g.k, t.k) * g.terms;
    most_units_ = multiprocessors;
    if (!sm90) most_units_ *= 2 * kGemmTiles[tile].resident_blocks();
    const double area = double(t.m) * t.n;
    step_ =
        std::max(area * t.k / rates_.multiply_adds, (t.m + t.n) * t.k * 2 / rates_.operand_bytes);
    share_ = area * 4 / kShareBytes;
    store_ = area * result_bytes(g) / rates_.result_bytes;
    epilogue_ = rates_.next_tile + store_;
  }

  // Returns the most splits worth trying: as long as all units run at a time. The sm_80 kernel may
  // have twice as many, so that the last ones leave few multiprocessors idle.
  int64_t most_splits() const {
    const int64_t room = most_units_ / std::max<int64_t>(tiles_, 1);
    return std::max<int64_t>(1, std::min({room, steps_ / rates_.steps_of_share, kMostSplits}));
  }

  double cycles(int64_t splits) const {
    const int64_t rounds = ceil_div(tiles_ * splits, multiprocessors_);
    const double sum = ceil_div(steps_, splits) * step_;
    // One ping-pong consumer multiplies while the other one computes its epilogue.
    const double next =
        ping_pong_ ? std::max(sum + store_, (sum + epilogue_) / 2) : sum + epilogue_;
    return (rounds - 1) * next + sum + epilogue_ + (splits > 1 ? splits * share_ : 0);
  }

 private:
  // Returns the bytes read or written per element of the result.
  static int result_bytes(const GemmArgs& g) {
    return size_of(g.out.dtype) + (g.c.data ? size_of(g.c.dtype) : 0);
  }

  const GemmRates& rates_;
  bool ping_pong_;
  int64_t multiprocessors_;
  int64_t tiles_;
  int64_t steps_;
  int64_t most_units_;
  double step_;      // cycles of a step
  double store_;     // cycles to store a tile's result
  double epilogue_;  // cycles from a tile's last step to its result
  double share_;     // cycles to store or add a share
};

}  // namespace amp_ext
