// The planner of the CUDA gemm for Python, with no more than a compiler of C++; and invariants of
// its plans. Units compute each step of each tile once, and memory equals the kernels' use.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "gemm/plan/choose.h"
#include "gemm/shared/scheduler.cuh"

namespace {

using namespace amp_ext;

constexpr uint32_t kMostUnits = 4000;  // of a plan with checked units

#define CHECK(condition) ((condition) ? void() : throw std::runtime_error(#condition))

std::string describe(const GemmTile& t) {
  return "tile " + std::to_string(t.m) + "x" + std::to_string(t.n) + "x" + std::to_string(t.k) +
         ", " + std::to_string(t.threads() / 32) + " warps, " + std::to_string(t.stages) +
         " stages, " + (t.aligned ? "16-byte loads" : "loads of single elements");
}

std::string describe(const Sm90Tile& t) {
  return "sm90 tile " + std::to_string(t.m) + "x" + std::to_string(t.n) + "x" +
         std::to_string(Sm90Tile::kStep) + (t.ping_pong ? ", ping-pong" : ", cooperative");
}

std::string describe(const GemmPlan& plan) {
  const auto major = [](Major m) { return m == Major::k ? "k" : "mn"; };
  const auto number = [](int64_t x) { return std::to_string(x); };
  std::string text = plan.sm90 ? describe(kSm90Tiles[plan.tile]) : describe(kGemmTiles[plan.tile]);
  if (plan.sm90)
    text += ", " + number(plan.stages) + " stages" + (plan.reduce ? ", added to out by TMA" : "");
  text += std::string("; a ") + major(plan.a_major) + "-major, b " + major(plan.b_major) +
          "-major; " + number(plan.tiles_m) + "x" + number(plan.tiles_n) + " tiles, ";
  if (plan.splits > 1) text += number(plan.splits) + " splits, ";
  return text + number(plan.steps) + " steps, groups of " + number(plan.group) + " rows; " +
         number(plan.blocks) + " blocks; " + number(plan.workspace_bytes) + " bytes of workspace";
}

// A dense matrix, or its transpose; its memory is never read.
MatrixRef dense(int64_t rows, int64_t columns, bool transposed, DType dtype = DType::f16) {
  void* const data = reinterpret_cast<void*>(1 << 20);
  return {data, dtype, rows * columns, transposed ? 1 : columns, transposed ? rows : 1};
}

// Each step of each tile is one share's, in order, and no two tiles are in one place. Shares differ
// by a step at most.
void check_units(const GemmArgs& g, const GemmPlan& plan) {
  std::map<std::pair<uint32_t, uint32_t>, GemmWork> shares;
  for (uint32_t block = 0; block < plan.blocks; ++block) {
    for (uint32_t unit = block; unit < plan.units; unit += plan.blocks) {
      const GemmWork work = work_of(plan, unit);
      CHECK(shares.try_emplace({work.tile, work.share}, work).second);
    }
  }
  std::set<std::tuple<int64_t, uint32_t, uint32_t>> places;
  int steps = 0;  // that have been seen of a tile
  for (const auto& [key, work] : shares) {
    if (work.share == 0) {
      CHECK(places.insert({work.batch, work.m, work.n}).second);
      steps = 0;
    }
    CHECK(work.batch < g.batch && work.m < plan.tiles_m && work.n < plan.tiles_n);
    CHECK(work.step < plan.term_steps);
    CHECK((work.matrix - work.batch * g.terms) * plan.term_steps + work.step == steps);
    const int least = plan.steps / static_cast<int>(plan.splits);
    CHECK(work.steps > 0 && (work.steps == least || work.steps == least + 1));
    steps += work.steps;
    CHECK((work.share + 1 == plan.splits) == (steps == plan.steps));
  }
  CHECK(shares.size() == places.size() * plan.splits);
  CHECK(static_cast<int64_t>(places.size()) == g.batch * plan.tiles_m * plan.tiles_n);
}

void check(const GemmArgs& g, const GemmPlan& plan, const GemmDevice& device) {
  const TileExtents tile = extents(plan.sm90, plan.tile);
  CHECK(plan.tiles_m == ceil_div(g.m, tile.m) && plan.tiles_n == ceil_div(g.n, tile.n));
  CHECK(plan.term_steps == ceil_div(g.k, tile.k) && plan.steps == g.terms * plan.term_steps);
  CHECK(plan.splits >= 1 && plan.group >= 1 && plan.group <= plan.tiles_m);
  const int64_t tiles = g.batch * plan.tiles_m * plan.tiles_n;
  const int64_t consumers = plan.sm90 && !kSm90Tiles[plan.tile].ping_pong ? 2 : 1;
  CHECK(plan.units == tiles * plan.splits);
  CHECK(plan.workspace_bytes == (plan.splits > 1 ? plan.units * int64_t{tile.m} * tile.n * 4 : 0));
  CHECK(plan.tickets == (plan.splits > 1 ? tiles * consumers : 0));
  if (plan.units <= kMostUnits) check_units(g, plan);
  if (!plan.sm90) return;
  CHECK(plan.stages >= 3 && plan.shared_bytes <= 227 << 10);
  CHECK(plan.blocks == std::min<uint32_t>(plan.units, device.multiprocessors));
}

// Tiles are cut if they are few. No share has few steps.
void check_choice(const GemmPlan& plan, const GemmDevice& device) {
  if (plan.splits == 1) return;
  CHECK(plan.splits <= 64 && plan.steps / int(plan.splits) >= (plan.sm90 ? 8 : 4));
  const int resident = plan.sm90 ? 1 : 2 * kGemmTiles[plan.tile].resident_blocks();
  CHECK(plan.units <= uint32_t(resident * device.multiprocessors));
}

using Random = std::mt19937_64;

int64_t below(Random& random, int64_t n) { return static_cast<int64_t>(random() % n); }

// A product of dense matrices without data, with one of the epilogues. Sizes are as often small as
// large, and as often odd as multiples of 8; all are multiples for sm_90a.
GemmArgs random_product(Random& random, bool sm90) {
  const auto one_in = [&](int n) { return below(random, n) == 0; };
  const auto size = [&](double limit, bool multiple) {
    const double exponent = std::uniform_real_distribution<>(0, limit)(random);
    const int64_t whole = ceil_div(static_cast<int64_t>(std::exp2(exponent)), 8) * 8;
    return whole - (multiple || one_in(2) ? 0 : below(random, 8));
  };
  GemmArgs g{};
  g.alpha = 1;
  g.batch = one_in(3) ? size(4, false) : 1;
  g.terms = one_in(3) ? size(4, false) : 1;
  g.m = size(12, sm90), g.n = size(12, sm90), g.k = size(14, sm90);
  constexpr DType kOut[] = {DType::f32, DType::f16, DType::bf16};
  g.a = dense(g.m, g.k, one_in(2)), g.b = dense(g.k, g.n, one_in(2));
  g.out = dense(g.m, g.n, false, kOut[below(random, 3)]);
  if (one_in(2)) g.c = g.out, g.beta = 1 + below(random, 2);
  if (!sm90 && one_in(5)) g.a.data = static_cast<char*>(g.a.data) + 2;
  return g;
}

}  // namespace

extern "C" {

// A tile of the kernels for sm_90a or sm_80 in words, or null without a tile of this number.
const char* gemm_tile(bool sm90, int tile) {
  if (tile < 0 || tile >= (sm90 ? kSm90TileCount : kGemmTileCount)) return nullptr;
  static thread_local std::string text;
  text = sm90 ? describe(kSm90Tiles[tile]) : describe(kGemmTiles[tile]);
  return text.c_str();
}

// The plan of dense 16-bit matrices in words, with a tile of sm_90a if it is not -1. `cycles`
// receives its predicted time.
const char* gemm_plan(int64_t m, int64_t n, int64_t k, bool trans_a, bool trans_b, bool fp32_out,
                      int multiprocessors, bool sm90, int tile, int64_t splits, double* cycles) {
  GemmArgs g{};
  g.batch = g.terms = 1;
  g.m = m;
  g.n = n;
  g.k = k;
  g.alpha = 1;
  g.a = dense(m, k, trans_a);
  g.b = dense(k, n, trans_b);
  g.out = dense(m, n, false, fp32_out ? DType::f32 : DType::f16);
  if (tile >= 0) g.variant = variant_of(GemmTileChoice{true, tile, splits});
  const GemmDevice device{multiprocessors, sm90};
  const GemmCandidate best = choose(g, device);
  static thread_local std::string text;
  text = describe(make_plan(g, best, device));
  *cycles = best.cycles;
  return text.c_str();
}

// The broken invariants of the planner's plans of random products, and of plans with any tile and
// number of splits, with the plan; empty if all hold.
const char* gemm_broken_plan(uint64_t seed, bool sm90) {
  static thread_local std::string text;
  Random random(seed);
  for (int i = 0; i < 3000; ++i) {
    constexpr int kMultiprocessors[] = {1, 4, 108, 132};
    const GemmDevice device{kMultiprocessors[below(random, 4)], sm90};
    GemmArgs g = random_product(random, sm90);
    GemmPlan plan = choose_plan(g, device);
    try {
      CHECK(can_run_sm80(g) && (!sm90 || can_run_sm90(g)) && (sm90 || !plan.sm90));
      const bool aligned = layout_of_a(g).aligned && layout_of_b(g).aligned;
      CHECK(plan.sm90 || kGemmTiles[plan.tile].aligned == aligned);
      const int tile = static_cast<int>(below(random, tile_count(sm90)));
      check(g, make_plan(g, GemmTileChoice{sm90, tile, 1 + below(random, 5)}, device), device);
      auto variants = plan_variants(g, device);
      variants.push_back(0);  // the planner's choice
      for (const int64_t variant : variants) {
        g.variant = variant;
        const GemmCandidate x = choose(g, device);
        plan = make_plan(g, x, device);
        CHECK((variant_of(x) == variant) == (variant != 0));
        check_choice(plan, device);
        check(g, plan, device);
      }
    } catch (const std::runtime_error& error) {
      text = std::string(error.what()) + " does not hold for " + describe(plan);
      return text.c_str();
    }
  }
  return "";
}

}  // extern "C"
