// The beginning of a block's shared memory: the barriers between producers and consumers, and the
// block's units, which one thread of the producers finds out for all others.
#pragma once

#include <cstdint>
#include <ptx/sm90.cuh>

#include "gemm/shared/scheduler.cuh"
#include "gemm/shared/swizzle.h"

namespace amp_ext {

constexpr int kWarpgroup = 128;

// A place in a ring of `size` stages or boxes. A round completes one phase of each one's barrier.
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

// A tile of this block's: where it begins, and whether any of it is in the matrix. Of a cluster's
// two tiles the second one may lie outside; then the block only feeds the other one.
struct BlockTile {
  int batch;
  int row;
  int column;
  bool inside;
};

// What the producer tells of one of the block's units.
struct Sm90Unit {
  GemmWork work;  // no steps: there are no more units
  BlockTile tile;
  Ring stages;  // of its first step
};

// The beginning of shared memory. The consumers' boxes and the stages follow it.
struct alignas(kSwizzleAlignment) Sm90Header {
  static constexpr int kUnits = 4, kBiases = 2;
  ptx::Mbarrier full[Sm90Tile::kMostStages];   // TMA has written the stage
  ptx::Mbarrier empty[Sm90Tile::kMostStages];  // all who read what this block fetches have read it
  ptx::Mbarrier turn[Sm90Tile::kConsumers];    // the other consumer of a ping-pong has multiplied
  ptx::Mbarrier side_full[Sm90Tile::kConsumers][Sm90Tile::kMostBoxes];  // TMA has written the box
  ptx::Mbarrier unit_full[kUnits];    // the producer has written it
  ptx::Mbarrier unit_empty[kUnits];   // all warps that read units have read it
  ptx::Mbarrier bias_full[kBiases];   // its columns are there
  ptx::Mbarrier bias_empty[kBiases];  // those who add it have read it
  Sm90Unit units[kUnits];             // in a ring by the numbers of the block's units
  union {                             // no product has both
    float bias[kBiases][256];         // the columns of a tile, likewise
    // Of each warp, over the rows of a part: of two parts, because a warp may be one ahead.
    float column_sums[Sm90Tile::kConsumers][2][4][Sm90Tile::kPartColumns];
  };
  bool last[Sm90Tile::kConsumers];
  bool others_there[Sm90Tile::kConsumers];  // the other shares of a tile
};
static_assert(sizeof(Sm90Header) == Sm90Tile::kHeaderBytes);

// Tells of the next unit whoever calls read_unit, when they have read the one before in its place.
__device__ inline void write_unit(Sm90Header& header, uint32_t round, const Sm90Unit& unit) {
  const uint32_t at = round % Sm90Header::kUnits, lap = round / Sm90Header::kUnits;
  ptx::mbarrier_wait(header.unit_empty[at], lap % 2 ^ 1);
  header.units[at] = unit;
  ptx::mbarrier_arrive(header.unit_full[at]);
}

// The block's unit of a round, to all lanes of a warp. Every warp that reads units reads all.
__device__ inline Sm90Unit read_unit(Sm90Header& header, uint32_t round) {
  const uint32_t at = round % Sm90Header::kUnits, lap = round / Sm90Header::kUnits;
  ptx::mbarrier_wait(header.unit_full[at], lap % 2);
  Sm90Unit unit = header.units[at];
  // What decides where warps go: wgmma has to be where all of them come.
  const auto make_uniform = [](auto& x) { x = ptx::warp_uniform(static_cast<int>(x)); };
  make_uniform(unit.work.steps), make_uniform(unit.work.shares);
  make_uniform(unit.tile.row), make_uniform(unit.tile.column), make_uniform(unit.tile.inside);
  make_uniform(unit.stages.at), make_uniform(unit.stages.parity);
  ptx::warp_sync();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(header.unit_empty[at]);
  return unit;
}

}  // namespace amp_ext
