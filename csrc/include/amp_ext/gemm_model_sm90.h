// The planner's choice among plans for sm_90a: predicted cycles.
//
// Figures are those of data sheets where that is said, else guesses that nothing has been measured
// for: a measured table, gemm_measured.h, goes before what follows from them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "amp_ext/gemm_memory.h"
#include "amp_ext/gemm_plan_sm90.h"

namespace amp_ext {

// Of one multiprocessor, per cycle. Data sheet: dense products, from 989 TFLOP/s of 132
// multiprocessors at 1.83 GHz; bytes of shared memory.
constexpr double kSm90Products = 2048;
constexpr double kSm90SharedBytes = 128;
// Guesses. What L2 answers: as much as a public kernel's 704 TFLOP/s by tiles of 128x256 without
// multicast takes. What arrives, multicast or not: two sectors of 32 bytes.
constexpr double kSm90L2Bytes = 36;
constexpr double kSm90ArrivingBytes = 64;
// Cycles, guesses: until a fetch from memory is there, or one from L2; from the launch to the first
// fetch (barriers, tensor maps, the cluster); to find the next tile; for a consumer's 64x32 part of
// the result, by its number of instructions: where it is only scaled, biased and stored, or more.
constexpr double kSm90Latency = 800;
constexpr double kSm90L2Latency = 400;
constexpr double kSm90Start = 1500;
constexpr double kSm90TileCycles = 1000;
constexpr double kSm90PartCycles = 500;
constexpr double kSm90LongPartCycles = 1500;
// Neighbours in a cluster wait for each other; a guess.
constexpr double kSm90ClusterFactor = 1.01;
// Bytes of shares that a consumer asks for before it waits: 128 by each of its threads.
constexpr double kSm90ShareBytes = 128 * 128;

constexpr int64_t kSm90StepsOfSplit = 8;
constexpr int64_t kSm90MostSplits = 64;
// What splits have to promise: they take memory, and their cost is the least certain.
constexpr double kSm90SplitFactor = 0.9;

// Predicts what a tile costs a cluster.
class Sm90Cycles {
 public:
  Sm90Cycles(const GemmArgs& g, const Sm90Tile& t, int stages, int cluster_m, int cluster_n)
      : ping_pong_(t.ping_pong), steps_(double(ceil_div(g.k, Sm90Tile::kStep)) * g.terms) {
    const int cluster = cluster_m * cluster_n;
    const double m = std::min<int64_t>(t.m, g.m), n = std::min<int64_t>(t.n, g.n);
    const double products = double(t.m) * t.n * Sm90Tile::kStep / kSm90Products;
    constexpr double kLineBytes = Sm90Tile::kStep * 2;
    // wgmma reads 64 rows of a, and all of b for them; what arrives is written.
    const double moved = t.m / 64 * (64.0 + t.n) + t.m + t.n;
    const double shared = moved * kLineBytes / kSm90SharedBytes;
    const double fetched = (m / cluster_n + n / cluster_m) * kLineBytes / kSm90L2Bytes;
    const double arriving = (m + n) * kLineBytes / kSm90ArrivingBytes;
    step_ = std::max({products, shared, fetched, arriving, kSm90Latency / (stages - 1)});
    if (cluster > 1) step_ *= kSm90ClusterFactor;

    int bytes = size_of(g.out.dtype);
    if (g.c.data) bytes += size_of(g.c.dtype);
    if (g.aux.data) bytes += size_of(g.aux.dtype);
    const double parts = double(t.consumer_m()) / Sm90Tile::kBoxRows * t.n / Sm90Tile::kBoxColumns;
    const bool is_plain = (!g.c.data || adds_to_out(g)) && !g.aux.data &&
                          g.activation == Activation::none && !g.column_sums;
    const double part = is_plain ? kSm90PartCycles : kSm90LongPartCycles;
    finish_ = kSm90TileCycles + std::max(parts * part, m * n * bytes / kSm90L2Bytes);
    const double share_bytes = double(t.m) * t.n * 4;
    const double consumers = t.ping_pong ? 1 : Sm90Tile::kConsumers;
    store_share_ = share_bytes / kSm90L2Bytes;
    add_share_ = share_bytes * kSm90L2Latency / (consumers * kSm90ShareBytes);
  }

  // From launch to end, when the clusters have `rounds` whole tiles each, and then, if splits > 1,
  // a share of a tile.
  double of(double rounds, int64_t splits) const {
    double cycles = kSm90Start + kSm90Latency;
    const double sum = steps_ * step_;
    if (rounds > 0) {
      const double next = ping_pong_ ? std::max(sum, (sum + finish_) / 2) : sum + finish_;
      cycles += sum + finish_ + (rounds - 1) * next;
    }
    if (splits > 1) {
      // Behind a whole tile the other consumer of a ping-pong has its sums ready meanwhile.
      if (ping_pong_ && rounds > 0) cycles -= std::min(finish_, std::ceil(steps_ / splits) * step_);
      cycles += std::ceil(steps_ / splits) * step_ + store_share_ + splits * add_share_ +
                2 * kSm90Latency + finish_;
    }
    return cycles;
  }

  // For which `of` is about the least.
  double best_splits() const { return std::sqrt(steps_ * step_ / add_share_); }

 private:
  bool ping_pong_;
  double steps_;
  double step_;
  double finish_;       // to finish a tile, and to store it
  double store_share_;  // a share of its sums
  double add_share_;
};

struct Sm90Choice {
  int tile = -1;
  int cluster_m = 1;
  int cluster_n = 1;
  uint32_t whole = 0;
  int64_t splits = 1;
  double cycles = INFINITY;  // the memory's left out
};

// Tries a tile and cluster with whole tiles only, and with its last round's tiles in splits where
// these would keep at most half of the clusters at work.
inline void consider(Sm90Choice& best, const GemmArgs& g, int tile, int stages, int cluster_m,
                     int cluster_n, int multiprocessors) {
  const Sm90Tile& t = kSm90Tiles[tile];
  const int64_t tiles =
      g.batch * ceil_div(g.m, int64_t{t.m} * cluster_m) * ceil_div(g.n, int64_t{t.n} * cluster_n);
  const int64_t clusters = sm90_clusters(cluster_m * cluster_n, multiprocessors);
  const int64_t rounds = tiles / clusters, left = tiles % clusters;
  const Sm90Cycles predicted(g, t, stages, cluster_m, cluster_n);
  const auto take = [&](int64_t whole, int64_t splits, double cycles) {
    if (cycles < best.cycles)
      best = {tile, cluster_m, cluster_n, static_cast<uint32_t>(whole), splits, cycles};
  };
  take(tiles, 1, predicted.of(rounds + (left > 0), 1));
  const int64_t steps = ceil_div(g.k, Sm90Tile::kStep) * g.terms;
  if (left == 0) return;
  const int64_t most = std::min({clusters / left, steps / kSm90StepsOfSplit, kSm90MostSplits});
  if (most < 2) return;
  const auto about = static_cast<int64_t>(std::min<double>(most, predicted.best_splits()));
  for (const int64_t splits : {std::max<int64_t>(2, about), std::min(most, about + 1)})
    if (splits >= 2)
      take(rounds * clusters, splits, predicted.of(rounds, splits) / kSm90SplitFactor);
}

// The choice that is predicted to take the fewest cycles. Of a cluster of two no block has nothing
// to do throughout.
inline Sm90Choice choose_sm90(const GemmArgs& g, int multiprocessors) {
  Sm90Choice best;
  const Major b_major = layout_of_b(g).major;
  for (int tile = 0; tile < kSm90TileCount; ++tile) {
    const Sm90Tile& t = kSm90Tiles[tile];
    if (!t.serves(b_major)) continue;
    const int stages = t.stages(sm90_boxes(g, t), size_of(g.out.dtype));
    consider(best, g, tile, stages, 1, 1, multiprocessors);
    if (multiprocessors < 2) continue;
    if (g.m > t.m) consider(best, g, tile, stages, 2, 1, multiprocessors);
    if (g.n > t.n) consider(best, g, tile, stages, 1, 2, multiprocessors);
  }
  return best;
}

}  // namespace amp_ext
