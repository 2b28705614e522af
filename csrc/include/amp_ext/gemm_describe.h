// Tiles and plans in words.
#pragma once

#include <string>

#include "amp_ext/gemm_tiles.h"

namespace amp_ext {

inline std::string describe(const GemmTile& t) {
  const auto number = [](int64_t x) { return std::to_string(x); };
  return "tile " + number(t.m) + "x" + number(t.n) + "x" + number(t.k) + ", " +
         number(t.threads() / 32) + " warps, " + number(t.stages) + " stages, " +
         (t.aligned ? "16-byte copies" : "single elements");
}

// What a block of the tile may take of a multiprocessor.
inline std::string describe_budget(const GemmTile& t) {
  const auto number = [](int64_t x) { return std::to_string(x); };
  return number(t.registers()) + " registers, " + number(t.shared_bytes()) +
         " bytes of shared memory, " + number(t.resident_blocks()) + " blocks at a time";
}

inline std::string describe(const Sm90Tile& t) {
  const auto number = [](int64_t x) { return std::to_string(x); };
  return "sm90 tile " + number(t.m) + "x" + number(t.n) + "x" + number(Sm90Tile::kStep) + ", " +
         (t.ping_pong ? "ping-pong" : "cooperative");
}

inline std::string describe(const GemmPlan& plan) {
  const auto major = [](Major m) { return m == Major::k ? "k" : "mn"; };
  const auto number = [](int64_t x) { return std::to_string(x); };
  if (plan.sm90)
    return describe(kSm90Tiles[plan.tile]) + ", clusters of " + number(plan.cluster_m) + "x" +
           number(plan.cluster_n) + ", " + number(plan.stages) + " stages, " + number(plan.boxes) +
           " boxes" + (plan.reduce ? ", adding in memory" : "") + "; a " + major(plan.a_major) +
           "-major, b " + major(plan.b_major) + "-major; " + number(plan.tiles_m) + "x" +
           number(plan.tiles_n) + " tiles, groups of " + number(plan.group) + ", " +
           number(plan.whole) + " whole, the others in " + number(plan.splits) + " splits of " +
           number(plan.steps) + " steps, " + number(plan.units) + " units by " +
           number(plan.blocks) + " blocks; " + number(plan.workspace_bytes) + " bytes, " +
           number(plan.tickets) + " tickets";
  return describe(kGemmTiles[plan.tile]) + "; a " + major(plan.a_major) + "-major, b " +
         major(plan.b_major) + "-major; " + number(plan.tiles_m) + "x" + number(plan.tiles_n) +
         " tiles, groups of " + number(plan.group) + ", " + number(plan.splits) + " splits of " +
         number(plan.steps) + " steps, " + number(plan.blocks) + " blocks; " +
         number(plan.workspace_bytes) + " bytes, " + number(plan.tickets) + " tickets";
}

}  // namespace amp_ext
