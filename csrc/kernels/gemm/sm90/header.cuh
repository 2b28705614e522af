// Defines the first part of a block's shared memory: barriers between producers and consumers, and
// the block's units. One producer thread computes the units for all others.
#pragma once

#include <cstdint>
#include <ptx/sm90.cuh>

#include "gemm/shared/scheduler.cuh"
#include "gemm/shared/swizzle.h"

namespace amp_ext {

constexpr int kWarpgroup = 128;

// A position in a ring of `size` stages or boxes. Each round completes one phase per barrier.
struct Ring {
  int at = 0;
  int parity = 0;  // of the phase that this round completes

  __device__ void advance(int size) {
    if (++at < size) return;
    at = 0;
    parity ^= 1;
  }
  __device__ int before(int places, int size) const {
    return at < places ? at - places + size : at - places;
  }
};

// The origin of a tile.
struct BlockTile {
  int batch;
  int row;
  int column;
};

// A unit of the block, as published by the producer.
struct Sm90Unit {
  uint32_t number;  // of the tile
  uint32_t share;
  int steps;  // 0 ends the units
  BlockTile tile;
  Ring stages;  // stage of its first step
};

// The first part of shared memory, followed by the consumers' boxes and the stages.
struct alignas(kSwizzleAlignment) Sm90Header {
  static constexpr int kUnits = 4, kBiases = 2;
  ptx::Mbarrier full[Sm90Tile::kMostStages];   // TMA has written the stage
  ptx::Mbarrier empty[Sm90Tile::kMostStages];  // the consumers have read the stage
  ptx::Mbarrier turn[Sm90Tile::kConsumers];    // the other ping-pong consumer has multiplied
  ptx::Mbarrier c_full[Sm90Tile::kConsumers][Sm90Tile::kMostBoxes];  // TMA has written the box
  ptx::Mbarrier unit_full[kUnits];    // the producer has written the unit
  ptx::Mbarrier unit_empty[kUnits];   // all reading warps have read the unit
  ptx::Mbarrier bias_full[kBiases];   // the bias columns are staged
  ptx::Mbarrier bias_empty[kBiases];  // the consumers have read the bias
  Sm90Unit units[kUnits];             // a ring indexed by the unit's number
  float bias[kBiases][256];           // columns of a tile, in a ring like units
  bool last[Sm90Tile::kConsumers];
};
static_assert(sizeof(Sm90Header) == Sm90Tile::kHeaderBytes);

// Publishes the next unit after all readers have read the previous unit in its slot.
__device__ inline void write_unit(Sm90Header& header, uint32_t round, const Sm90Unit& unit) {
  const uint32_t at = round % Sm90Header::kUnits, lap = round / Sm90Header::kUnits;
  ptx::mbarrier_wait(header.unit_empty[at], lap % 2 ^ 1);
  header.units[at] = unit;
  ptx::mbarrier_arrive(header.unit_full[at]);
}

// Waits for the block's unit of work of a round, and returns it to every lane. Every reading warp
// must read every unit, because it also frees the unit's slot.
__device__ inline Sm90Unit read_unit(Sm90Header& header, uint32_t round) {
  const uint32_t at = round % Sm90Header::kUnits, lap = round / Sm90Header::kUnits;
  ptx::mbarrier_wait(header.unit_full[at], lap % 2);
  Sm90Unit unit = header.units[at];
  // Makes the control flow's values uniform: wgmma requires all warps of a warpgroup.
  const auto make_uniform = [](auto& x) { x = ptx::warp_uniform(static_cast<int>(x)); };
  make_uniform(unit.steps);
  make_uniform(unit.tile.row), make_uniform(unit.tile.column);
  make_uniform(unit.stages.at), make_uniform(unit.stages.parity);
  ptx::warp_sync();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(header.unit_empty[at]);
  return unit;
}

}  // namespace amp_ext
