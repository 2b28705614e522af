// Describe tiles and plans of csrc/kernels/gemm/plan in words.
#pragma once

#include <string>

#include "gemm/plan/tiles.h"

namespace amp_ext {

inline std::string describe(const GemmTile& t) {
  return "tile " + std::to_string(t.m) + "x" + std::to_string(t.n) + "x" + std::to_string(t.k) +
         ", " + std::to_string(t.threads() / 32) + " warps, " + std::to_string(t.stages) +
         " stages, " + (t.aligned ? "16-byte loads" : "loads of single elements");
}

inline std::string describe(const Sm90Tile& t) {
  return "sm90 tile " + std::to_string(t.m) + "x" + std::to_string(t.n) + "x" +
         std::to_string(Sm90Tile::kStep) + (t.ping_pong ? ", ping-pong" : ", cooperative");
}

inline std::string describe(const GemmPlan& plan) {
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

}  // namespace amp_ext
