// Predicts the cycles of a product for a tile and a cut of the tiles. Constants come
// from data sheets where a comment says so, and are guesses otherwise: none is measured.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "gemm/plan/serves.h"

namespace amp_ext {

// Shared memory of a multiprocessor in bytes per cycle (data sheet), and the latencies of a load
// from device memory and, when all multiprocessors load, from L2.
constexpr double kSharedBytes = 128;
constexpr double kLatency = 800;
constexpr double kL2Latency = 650;

// Device memory of an H200 in bytes per cycle and multiprocessor: 90% of the data sheet's figure.
constexpr double kMemoryBytes = 18;
// The bytes that L2 keeps: half of an H200's 60 MB. This is a guess: the other half holds streaming
// data and copies, since each half of the multiprocessors has its own L2.
constexpr double kKeptBytes = 30e6;

constexpr int64_t kMostSplits = 64;

// Predicted cycles, and the cost that ranks plans. The cost counts the addition of shares twice,
// since it takes memory and its prediction is the least certain.
struct Prediction {
  double cycles;
  double cost;

  Prediction(double others, double adding = 0)
      : cycles(others + adding), cost(others + 2 * adding) {}
};

// Returns the bytes read or written per element of the result.
inline int epilogue_bytes(const GemmArgs& g) {
  return size_of(g.out.dtype) + (g.c.data ? size_of(g.c.dtype) : 0) +
         (g.aux.data ? size_of(g.aux.dtype) : 0);
}

// ---- sm_80 --------------------------------------------------------------------------------------

// FP16 multiply-adds (data sheet) and bytes from L2, per cycle.
constexpr double kSm80MultiplyAdds = 1024;
constexpr double kSm80L2Bytes = 40;
constexpr int64_t kSm80StepsOfSplit = 4;  // the fewest, to keep pipelines full

// Predicts a tile of sm_80. Each multiprocessor runs rounds of resident blocks. Its time is the
// maximum of tensor core time, memory time and the blocks' load latency.
class Sm80Cost {
 public:
  Sm80Cost(const GemmArgs& g, const GemmTile& t, int multiprocessors)
      : tiles(std::ceil(double(g.m) / t.m) * std::ceil(double(g.n) / t.n) * g.batch),
        multiprocessors_(multiprocessors),
        resident_(t.resident_blocks()),
        steps_(ceil_div(g.k, t.k) * g.terms),
        waiting_step_(kLatency / (t.stages - 1)),
        epilogue_(double(t.m) * t.n * epilogue_bytes(g) / kSm80L2Bytes),
        share_(double(t.m) * t.n * 4 / kSm80L2Bytes) {
    const double multiply_adds = double(t.m) * t.n * t.k / kSm80MultiplyAdds;
    const double step_bytes = (t.m + t.n) * t.k * 2;
    const double fragment_bytes = (t.warp_m() + t.warp_n()) * t.k * 2.0 * t.warps_m * t.warps_n;
    const double shared = (step_bytes + fragment_bytes) / kSharedBytes;
    // Unaligned loads take single elements: a warp's load touches 16 sectors, and L1 returns four
    // per cycle.
    const double loads = t.aligned ? step_bytes / kSm80L2Bytes : step_bytes / 2 / 32 * 4;
    busy_step_ = std::max({multiply_adds, shared, loads});
  }

  const double tiles;

  // Returns the most splits worth trying. Few tiles are split until there are two blocks per
  // resident block, so that the last blocks leave few multiprocessors idle.
  int64_t most_splits() const {
    if (tiles < 1 || tiles >= 2.0 * multiprocessors_) return 1;
    const auto room = static_cast<int64_t>(2.0 * multiprocessors_ * resident_ / tiles);
    return std::max<int64_t>(1, std::min({room, steps_ / kSm80StepsOfSplit, kMostSplits}));
  }

  Prediction predict(int64_t splits) const {
    const double rounds = std::ceil(std::max(tiles, 1.0) / multiprocessors_ * splits);
    const double at_a_time = std::min<double>(rounds, resident_);
    const double steps = std::ceil(double(steps_) / splits);
    const double busy = rounds * (steps * busy_step_ + epilogue_);
    const double waiting =
        std::ceil(rounds / at_a_time) * (steps * waiting_step_ + 2 * kLatency + epilogue_);
    const double computing = std::max(busy, waiting);
    const double adding = share_ * (splits + 1) + 2 * kLatency;
    return splits > 1 ? Prediction(computing, adding) : Prediction(computing);
  }

 private:
  int multiprocessors_;
  int resident_;
  int64_t steps_;
  double busy_step_;
  double waiting_step_;
  double epilogue_;  // per tile
  double share_;     // cycles to write or read a tile's sums
};

// ---- sm_90a -------------------------------------------------------------------------------------

// FP16 multiply-adds and bytes from L2, per cycle. Both are from an H100: under its power limit
// tensor cores reach 85% of the data sheet's rate, and tiles of 64x256 have received 55 bytes. One
// multiprocessor alone may receive two 32-byte sectors, which is a guess.
constexpr double kSm90MultiplyAdds = 1740;
constexpr double kSm90L2Bytes = 56;
constexpr double kSm90ArrivingBytes = 64;
// Guesses, in cycles: from the launch to the first load (barriers, tensor maps), and to find the
// next tile. Computing 64x32 elements of a plain result has a figure for 16 and one for
// 32 bits, from the instructions counted by tests/build/sass_gemm.py. Other results have the last
// one, the time of a GELU on an H100.
constexpr double kSm90Start = 1500;
constexpr double kSm90TileCycles = 450;
constexpr double kSm90PartCycles16 = 130;
constexpr double kSm90PartCycles32 = 240;
constexpr double kSm90LongPartCycles = 2100;
// Bytes of sums that a consumer loads before it waits, and the fraction for shares before its own.
constexpr double kSm90ShareBytes = 128 * 128;
constexpr double kSm90PartBefore = 7.0 / 8;
// The fewest steps of a share. Each share costs writing and reading a tile's sums.
constexpr int64_t kSm90StepsOfShare = 8;

// The cut of a plan's tiles, as in GemmPlan.
struct Sm90Cut {
  int64_t whole;
  int64_t splits = 1;
};

// Bytes of a row of a, or a column of b, per step along k.
constexpr double kSm90LineBytes = Sm90Tile::kStep * 2;

// Returns the cycles of a tile's step, limited by tensor cores or by shared memory. For each 64
// rows, wgmma reads these rows of a and all of b; arriving data is written once.
inline double sm90_step_cycles(double m, double n) {
  const double lines = m / 64 * (64 + n) + m + n;
  return std::max(m * n * Sm90Tile::kStep / kSm90MultiplyAdds,
                  lines * kSm90LineBytes / kSharedBytes);
}

// Predicts a tile of sm_90a.
class Sm90Cost {
 public:
  Sm90Cost(const GemmArgs& g, const Sm90Tile& t, int multiprocessors)
      : ping_pong_(t.ping_pong),
        steps_(ceil_div(g.k, Sm90Tile::kStep) * g.terms),
        tiles_(g.batch * ceil_div(g.m, t.m) * ceil_div(g.n, t.n)),
        multiprocessors_(multiprocessors) {
    const Sm90Memory memory = sm90_memory(g, t);
    const double m = std::min<int64_t>(t.m, g.m), n = std::min<int64_t>(t.n, g.n);
    const double loaded = (m + n) * kSm90LineBytes / kSm90L2Bytes;
    step_ = std::max({sm90_step_cycles(t.m, t.n), loaded, kLatency / (memory.stages - 1)});

    const double parts = double(t.consumer_m()) / Sm90Tile::kBoxRows * t.n / Sm90Tile::kPartColumns;
    const double plain = g.out.dtype == DType::f32 ? kSm90PartCycles32 : kSm90PartCycles16;
    parts_ = parts * (is_plain(g) ? plain : kSm90LongPartCycles);
    result_bytes_ = m * n * epilogue_bytes(g);
    // On an H100 the time beside the steps was the time to write the result to memory, for both
    // kinds of tiles.
    store_ = result_bytes_ / kMemoryBytes;
    to_next_ = kSm90TileCycles + std::max(parts_, store_);
    share_bytes_ = double(t.m) * t.n * 4;
    const double consumers = t.ping_pong ? 1 : Sm90Tile::kConsumers;
    const double waits = share_bytes_ / (consumers * kSm90ShareBytes);
    wait_for_share_ = std::ceil(waits / kSm90PartBefore) * kL2Latency;

    lines_ = double(g.m) + g.n;
    tile_area_ = double(t.m) * t.n;
    step_memory_ = kSm90LineBytes / (kMemoryBytes * multiprocessors);
  }

  // Cuts no tile.
  Sm90Cut uncut() const { return {tiles_}; }
  // Cuts each tile of a partial last round into `splits` shares.
  Sm90Cut equal(int64_t splits) const { return {tiles_ - left(), splits}; }
  // Calls visit(cut) for the cuts that may cost the fewest cycles.
  template <class Visit>
  void each_cut(Visit visit) const {
    visit(uncut());
    if (left() == 0) return;
    const int64_t room = multiprocessors_ / left();
    const int64_t most = std::min({room, steps_ / kSm90StepsOfShare, kMostSplits});
    if (most >= 2) {
      const auto about = static_cast<int64_t>(std::min<double>(most, best_splits()));
      visit(equal(std::max<int64_t>(2, about)));
      if (about > 0) visit(equal(std::min(most, about + 1)));
    }
  }

  Prediction predict(const Sm90Cut& cut) const {
    const double whole = kSm90Start + kLatency + whole_cycles(cut.whole);
    if (cut.whole == tiles_) return whole;
    const double tail = tiles_ - cut.whole;
    const double shares = std::ceil(double(steps_) / cut.splits) * step_;
    const double sums = std::max(shares, memory_cycles(tail));
    // After a whole tile, the other ping-pong consumer finishes its sums during the epilogue.
    const double epilogue = last_epilogue(cut.whole);
    const double hidden = ping_pong_ ? std::min(epilogue, sums) : epilogue - to_next_;
    return {whole + sums - (cut.whole > 0 ? hidden : 0) + last_epilogue(tail), adding(cut)};
  }

 private:
  // Returns the number of tiles in the partial last round.
  int64_t left() const { return tiles_ % multiprocessors_; }
  // Returns the number of equal shares with about the lowest cost.
  double best_splits() const { return std::sqrt(steps_ * step_ / wait_for_share_); }

  // Returns L2's bytes per cycle and multiprocessor after the last sums of so many tiles. Only the
  // multiprocessors of the last round share L2's total rate, up to the arriving rate.
  double last_l2_bytes(int64_t tiles) const {
    const int64_t last = tiles - (ceil_div(tiles, multiprocessors_) - 1) * multiprocessors_;
    return std::min(kSm90ArrivingBytes, kSm90L2Bytes * multiprocessors_ / last);
  }
  // Returns the cycles from the last tile's sums until its result is stored.
  double last_epilogue(int64_t tiles) const {
    if (tiles == 0) return 0;
    return kSm90TileCycles + std::max(parts_, result_bytes_ / last_l2_bytes(tiles));
  }

  // Returns the cycles of so many whole tiles.
  double whole_cycles(int64_t tiles) const {
    if (tiles == 0) return 0;
    const double sum = steps_ * step_;
    const double next = ping_pong_ ? std::max(sum + store_, (sum + to_next_) / 2) : sum + to_next_;
    return sum + last_epilogue(tiles) + (ceil_div(tiles, multiprocessors_) - 1) * next;
  }

  // Returns the cycles after the sums of a share that is not the last of its tile.
  double share_cycles() const { return share_bytes_ / kSm90L2Bytes + 2 * kLatency; }

  // Returns the cycles between the sums of a tile's last share and its epilogue. The last share is
  // stored too, unless it ends later than the others.
  double adding(const Sm90Cut& cut) const {
    const double load =
        share_bytes_ / last_l2_bytes(std::min(tiles_ - cut.whole, multiprocessors_));
    return share_cycles() + (cut.splits - 1) * std::max(wait_for_share_, load);
  }

  // Returns the cycles until a tail's operands have come from memory. The shares read the same rows
  // of a and columns of b at about the same time, once.
  double memory_cycles(double tail) const {
    return std::min(lines_, 2 * std::sqrt(tail * tile_area_)) * steps_ * step_memory_;
  }

  bool ping_pong_;
  int64_t steps_;
  int64_t tiles_;
  int64_t multiprocessors_;
  double step_;
  double parts_;           // instruction cycles of a tile's epilogue
  double result_bytes_;    // bytes moved by a tile's epilogue
  double to_next_;         // until the consumer can multiply again
  double store_;           // cycles to write a tile's result to memory
  double share_bytes_;     // bytes of a tile's sums
  double wait_for_share_;  // latencies to load a share
  double lines_;           // rows of a and columns of b
  double tile_area_;
  double step_memory_;  // memory cycles of a line's step
};

// ---- the order of tiles -------------------------------------------------------------------------

// Returns how many rows of tiles to compute together, column by column. For sm_90a the number
// minimises the bytes of a and b from device memory, with kKeptBytes of reuse in L2. Ties, and
// sm_80, minimise the rows of a and columns of b read at a time.
inline uint32_t group_rows(const GemmArgs& g, const GemmPlan& plan, int64_t tile_m, int64_t tile_n,
                           int64_t at_a_time) {
  const int64_t tiles_m = plan.tiles_m, tiles_n = plan.tiles_n;
  const double line = 2.0 * g.k * g.terms;
  uint32_t best = 1;
  double fewest_bytes = INFINITY, fewest_lines = INFINITY;
  for (int64_t group = 1; group <= std::min<int64_t>(tiles_m, 64); group *= 2) {
    const int64_t columns = std::min(tiles_n, ceil_div(at_a_time, group));
    const int64_t rows = std::min(tiles_m, ceil_div(at_a_time, columns));
    double bytes = 0;
    if (plan.sm90) {
      const int64_t kept_rows = std::min(tiles_m, std::max(group, rows));
      const double a_kept = kept_rows * tile_m * line;
      const bool keeps_a = a_kept + columns * tile_n * line <= kKeptBytes;
      const bool keeps_b = a_kept + g.n * line <= kKeptBytes;
      bytes = line * (double(g.m) * (keeps_a ? 1 : ceil_div(tiles_n, columns)) +
                      double(g.n) * (keeps_b ? 1 : ceil_div(tiles_m, kept_rows)));
    }
    const double lines = rows * tile_m + columns * tile_n;
    if (bytes > fewest_bytes || (bytes == fewest_bytes && lines >= fewest_lines)) continue;
    best = static_cast<uint32_t>(group), fewest_bytes = bytes, fewest_lines = lines;
  }
  return best;
}

}  // namespace amp_ext
