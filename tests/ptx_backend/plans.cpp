// Check invariants of the planner, csrc/kernels/gemm/plan. Units compute each step of each tile
// once, and shared memory, workspace and tickets equal the kernels' use.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../support/plan_text.h"
#include "gemm/plan/choose.h"
#include "gemm/shared/scheduler.cuh"

namespace {

using namespace amp_ext;

constexpr uint32_t kMostUnits = 4000;  // of a plan with checked units

#define CHECK(condition) ((condition) ? void() : throw std::runtime_error(#condition))

int64_t tiles_of(const GemmArgs& g, const GemmPlan& plan) {
  return g.batch * plan.tiles_m * plan.tiles_n;
}

void check_sizes(const GemmArgs& g, const GemmPlan& plan) {
  const TileExtents tile = extents(plan.sm90, plan.tile);
  CHECK(plan.tiles_m == ceil_div(g.m, tile.m) && plan.tiles_n == ceil_div(g.n, tile.n));
  CHECK(plan.term_steps == ceil_div(g.k, tile.k) && plan.steps == g.terms * plan.term_steps);
  CHECK(plan.units == tiles_of(g, plan) * plan.splits);
  CHECK(plan.splits >= 1 && plan.steps >= int(plan.splits));
  CHECK(plan.group >= 1 && plan.group <= plan.tiles_m);
}

// Units of the workers, each in its order, by tile and share.
using Shares = std::map<std::pair<uint32_t, uint32_t>, GemmWork>;

Shares all_shares(const GemmPlan& plan) {
  Shares shares;
  for (uint32_t block = 0; block < plan.blocks; ++block) {
    for (uint32_t unit = block; unit < plan.units; unit += plan.blocks) {
      const GemmWork work = work_of(plan, unit);
      CHECK(shares.try_emplace({work.tile, work.share}, work).second);
    }
  }
  return shares;
}

// Each step of each tile is one share's, in order, and no two tiles are in one place.
void check_units(const GemmArgs& g, const GemmPlan& plan) {
  std::vector<int64_t> places;
  int steps = plan.steps;  // that have been seen of a tile
  for (const auto& [key, work] : all_shares(plan)) {
    const auto [tile, share] = key;
    CHECK(work.batch < g.batch && work.m < plan.tiles_m && work.n < plan.tiles_n);
    const int64_t place = (work.batch * plan.tiles_m + work.m) * plan.tiles_n + work.n;
    if (share == 0) {
      CHECK(tile == places.size() && steps == plan.steps);  // nothing is missing of the one before
      places.push_back(place), steps = 0;
    }
    CHECK(place == places.back() && share < plan.splits);
    CHECK(work.steps > 0 && work.step < plan.term_steps);
    CHECK((work.matrix - work.batch * g.terms) * plan.term_steps + work.step == steps);
    steps += work.steps;
    CHECK((share + 1 == plan.splits) == (steps == plan.steps));
  }
  CHECK(static_cast<int64_t>(places.size()) == tiles_of(g, plan) && steps == plan.steps);
  std::ranges::sort(places);
  CHECK(std::ranges::adjacent_find(places) == places.end());
}

// Shares differ by a step at most.
void check_balance(const GemmPlan& plan) {
  int least = INT32_MAX, most = 0;
  for (uint32_t unit = 0; unit < plan.units; ++unit) {
    const int steps = work_of(plan, unit).steps;
    least = std::min(least, steps), most = std::max(most, steps);
  }
  CHECK(most - least <= 1 || most == 0);
}

void check_memory(const GemmArgs& g, const GemmPlan& plan) {
  const TileExtents tile = extents(plan.sm90, plan.tile);
  const int64_t consumers = plan.sm90 && !kSm90Tiles[plan.tile].ping_pong ? 2 : 1;
  const int64_t bytes = plan.splits > 1 ? int64_t{plan.units} * tile.m * tile.n * 4 : 0;
  const int64_t tickets = plan.splits > 1 ? tiles_of(g, plan) * consumers : 0;
  CHECK(plan.workspace_bytes == bytes && plan.tickets == tickets);
}

// A block has as many stages as shared memory allows; each block has work.
void check_sm90(const GemmArgs& g, const GemmPlan& plan, const GemmDevice& device) {
  const Sm90Tile& tile = kSm90Tiles[plan.tile];
  const int stage = (tile.m + tile.n) * 64 * 2, most = 227 << 10;
  const bool is_fp32 = g.out.dtype == DType::f32;
  const int boxes = 2 * plan.boxes * 64 * plan.box_columns * (is_fp32 ? 4 : 2);
  CHECK(plan.shared_bytes == 3072 + boxes + plan.stages * stage && plan.shared_bytes <= most);
  CHECK(plan.stages >= 3 && (plan.stages == 8 || plan.shared_bytes + stage > most));
  const bool adds_c = g.c.data && !plan.reduce;
  CHECK(plan.boxes == 4 || (plan.boxes == 2 && plan.plain));
  CHECK(!adds_c || !plan.plain);
  CHECK(plan.box_columns == (plan.plain && !is_fp32 ? 64 : 32));
  CHECK(plan.blocks == std::min<uint32_t>(plan.units, device.multiprocessors));
}

// Tiles are cut if they are few. No share has few steps.
void check_choice(const GemmPlan& plan, const GemmDevice& device) {
  if (plan.splits == 1) return;
  CHECK(plan.splits <= 64 && plan.steps / int(plan.splits) >= (plan.sm90 ? 8 : 4));
  const int resident = plan.sm90 ? 1 : 2 * kGemmTiles[plan.tile].resident_blocks();
  CHECK(plan.units <= uint32_t(resident * device.multiprocessors));
}

class Problems {
 public:
  explicit Problems(uint64_t seed) : random_(seed) {}

  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % n); }
  bool one_in(int n) { return below(n) == 0; }

  // Sizes are as often small as large, and as often odd as multiples of 8, unless all are
  // multiples.
  int64_t size(double limit, bool multiples) {
    const double exponent = std::uniform_real_distribution<>(0, limit)(random_);
    return ceil_div(static_cast<int64_t>(std::exp2(exponent)), 8) * 8 -
           (multiples || one_in(2) ? 0 : below(8));
  }

  MatrixRef matrix(int64_t rows, int64_t columns, bool by_rows, DType dtype = DType::f16) {
    void* const data = reinterpret_cast<void*>(4096);
    return {data, dtype, rows * columns, by_rows ? columns : 1, by_rows ? 1 : rows};
  }

  // A product of dense matrices without data, with one of the epilogues.
  GemmArgs next(bool sm90) {
    GemmArgs g{};
    g.batch = g.terms = g.alpha = 1;
    if (one_in(4))
      g.batch = size(4, false);
    else if (one_in(3))
      g.terms = size(4, false);
    if (one_in(8)) g.batch = 3, g.terms = 5;
    g.m = size(12, sm90), g.n = size(12, sm90), g.k = size(14, sm90);
    constexpr DType kOut[] = {DType::f32, DType::f16, DType::bf16};
    g.a = matrix(g.m, g.k, one_in(2)), g.b = matrix(g.k, g.n, one_in(2));
    g.out = matrix(g.m, g.n, true, kOut[below(3)]);
    if (one_in(2)) g.c = g.out, g.beta = 1 + below(2);
    if (!sm90 && one_in(5)) g.a.data = static_cast<char*>(g.a.data) + 2;
    return g;
  }

  GemmTileChoice tile(bool sm90) {
    return {sm90, static_cast<int>(below(tile_count(sm90))), 1 + below(5)};
  }

 private:
  std::mt19937_64 random_;
};

void check(const GemmArgs& g, const GemmPlan& plan, const GemmDevice& device) {
  check_sizes(g, plan);
  check_memory(g, plan);
  if (plan.units <= kMostUnits) {
    check_units(g, plan);
    check_balance(plan);
  }
  if (plan.sm90) check_sm90(g, plan, device);
}

}  // namespace

extern "C" {

// Checks the planner's plans of random products, and plans with any tile and number of splits.
// Returns the broken invariants with their plans; empty if all hold.
const char* ptx_check_plans(uint64_t seed, bool sm90) {
  static std::string text;
  Problems problems(seed);
  for (int i = 0; i < 3000; ++i) {
    constexpr int kMultiprocessors[] = {1, 4, 108, 132};
    const int multiprocessors = kMultiprocessors[problems.below(4)];
    const GemmArgs g = problems.next(sm90);
    const GemmDevice device{multiprocessors, sm90};
    GemmPlan plan = choose_plan(g, device);
    try {
      CHECK(can_run_sm80(g) && (!sm90 || can_run_sm90(g)) && (sm90 || !plan.sm90));
      const bool aligned = layout_of_a(g).aligned && layout_of_b(g).aligned;
      CHECK(plan.sm90 || kGemmTiles[plan.tile].aligned == aligned);
      check_choice(plan, device);
      check(g, plan, device);
      plan = make_plan(g, problems.tile(sm90), device);
      check(g, plan, device);
      for (GemmArgs measured = g; const int64_t variant : plan_variants(g, device)) {
        measured.variant = variant;
        const GemmCandidate x = choose(measured, device);
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
