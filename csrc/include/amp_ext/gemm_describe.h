// Tiles and plans in words.
#pragma once

#include <string>

#include "amp_ext/gemm_plan_sm90.h"
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

// The same of the kernel for sm_90a, whose blocks each have a multiprocessor: registers of threads,
// then what a result of 16 and of 32 bits leaves for stages.
inline std::string describe_budget(const Sm90Tile& t) {
  const auto number = [](int64_t x) { return std::to_string(x); };
  constexpr int producer = Sm90Tile::kProducerRegisters, consumer = Sm90Tile::kConsumerRegisters;
  std::string text = number(producer) + " and " + number(consumer) + " registers, " +
                     number((producer + Sm90Tile::kConsumers * consumer) * 128) + " in all";
  for (const int bytes : {2, 4}) {
    const int boxes = sm90_boxes(t, bytes), stages = t.stages(boxes, bytes);
    text += "; " + number(bytes * 8) + " bits: " + number(stages) + " stages, " + number(boxes) +
            " boxes, " + number(t.shared_bytes(stages, boxes, bytes)) + " bytes of shared memory";
  }
  return text;
}

inline std::string describe(const GemmPlan& plan) {
  const auto major = [](Major m) { return m == Major::k ? "k" : "mn"; };
  const auto number = [](int64_t x) { return std::to_string(x); };
  std::string text = plan.sm90 ? describe(kSm90Tiles[plan.tile]) : describe(kGemmTiles[plan.tile]);
  if (plan.sm90)
    text += ", clusters of " + number(plan.cluster_m) + "x" + number(plan.cluster_n) + ", " +
            number(plan.stages) + " stages, " + number(plan.boxes) + " boxes, " +
            number(plan.shared_bytes) + " bytes" + (plan.reduce ? ", adding in memory" : "");
  text += std::string("; a ") + major(plan.a_major) + "-major, b " + major(plan.b_major) +
          "-major; " + number(plan.tiles_m) + "x" + number(plan.tiles_n) + " tiles, groups of " +
          number(plan.group) + ", ";
  if (plan.sm90 && plan.splits > 1) text += number(plan.whole) + " whole, others in ";
  return text + number(plan.splits) + " splits of " + number(plan.steps) + " steps, " +
         (plan.sm90 ? number(plan.units) + " units by " : "") + number(plan.blocks) + " blocks; " +
         number(plan.workspace_bytes) + " bytes, " + number(plan.tickets) + " tickets";
}

}  // namespace amp_ext
