// Sums a tile on Hopper. One thread issues TMA loads of 64 along k into a ring of stages, across
// all tiles of the block, and the consumers multiply them by wgmma.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "amp_ext/gemm.h"
#include "header.cuh"

namespace amp_ext {

constexpr int kAtom = Sm90Tile::kStep;  // elements in a swizzled row of 128 bytes

// The tensor maps of a launch.
struct Sm90Maps {
  CUtensorMap a;
  CUtensorMap b;
  CUtensorMap c;
  CUtensorMap out;
};

// A step of an operand in shared memory, with kExtent of m or n. Lines are contiguous as in global
// memory, and lie in swizzled rows of 64 elements.
template <int kExtent, Major kMajor>
struct Sm90Operand {
  static constexpr bool kByK = kMajor == Major::k;
  static constexpr int kRowBytes = kAtom * 2;
  static constexpr int kLines = kByK ? kExtent : kAtom;
  static constexpr int kParts = kByK ? 1 : kExtent / kAtom;
  static constexpr int kPartBytes = kLines * kRowBytes;
  static constexpr int kBytes = kParts * kPartBytes;
  // The descriptor's advance in bytes for the next 16 of k: within rows, or by whole rows.
  static constexpr int kAdvance = kByK ? 32 : 16 * kRowBytes;

  // Starts to load the step at index `mn` of m or n and `k` of matrix z.
  __device__ static void fetch(unsigned char* to, const CUtensorMap& map, ptx::Mbarrier& full,
                               int mn, int k, int z) {
    const int x = kByK ? k : mn, y = kByK ? mn : k;
    for (int part = 0; part < kParts; ++part)
      ptx::tma_load(to + part * kPartBytes, map, full, x + part * kAtom, y, z);
  }

  // Describes the step from index `mn`, a multiple of 64.
  __device__ static uint64_t descriptor(const unsigned char* step, int mn) {
    const int offset = kByK ? mn * kRowBytes : mn / kAtom * kPartBytes;
    constexpr int kLeading = kByK ? 16 : kPartBytes;
    return ptx::wgmma_descriptor(step + offset, kLeading, 8 * kRowBytes);
  }
};

// An instance of the kernel.
template <class T, int kTileIndex, Major kMajorA, Major kMajorB>
struct Sm90Gemm {
  using Element = T;
  static constexpr Sm90Tile kTile = kSm90Tiles[kTileIndex];
  using A = Sm90Operand<kTile.m, kMajorA>;
  using B = Sm90Operand<kTile.n, kMajorB>;
  static_assert(A::kBytes + B::kBytes == kTile.stage_bytes());

  // The number of consumers that share a tile.
  static constexpr int kTeam = kTile.ping_pong ? 1 : Sm90Tile::kConsumers;
  // A consumer's sums, in blocks of wgmma's 64 rows.
  static constexpr int kRowBlocks = kTile.consumer_m() / 64;
  using Sums = float[kRowBlocks][kTile.n / 2];

  __device__ static void multiply(Sums& sums, int block, uint64_t a, uint64_t b, bool accumulate) {
    ptx::wgmma<T, kTile.n, static_cast<ptx::Major>(kMajorA), static_cast<ptx::Major>(kMajorB)>(
        sums[block], a, b, accumulate);
  }
};

// Loads the steps of all of the block's units by one thread, and publishes each unit.
template <class Gemm>
__device__ void produce(Sm90Header& header, unsigned char* stages, const Sm90Maps& maps,
                        const GemmArgs& g, const GemmPlan& plan) {
  Ring ring;
  uint32_t round = 0;
  for (uint32_t unit = ptx::block_index(); unit < plan.units; unit += plan.blocks, ++round) {
    const GemmWork work = work_of(plan, unit);
    const BlockTile tile{static_cast<int>(work.batch), static_cast<int>(work.m) * Gemm::kTile.m,
                         static_cast<int>(work.n) * Gemm::kTile.n};
    write_unit(header, round, {work.tile, work.share, work.steps, tile, ring});
    int matrix = static_cast<int>(work.matrix), step = work.step;
    for (int i = 0; i < work.steps; ++i, ring.advance(plan.stages)) {
      ptx::Mbarrier& full = header.full[ring.at];
      unsigned char* const stage = stages + ring.at * Gemm::kTile.stage_bytes();
      // The first round does not wait.
      ptx::mbarrier_wait(header.empty[ring.at], ring.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, Gemm::kTile.stage_bytes());
      Gemm::A::fetch(stage, maps.a, full, tile.row, step * kAtom,
                     g.a.batch_stride == 0 ? 0 : matrix);
      Gemm::B::fetch(stage + Gemm::A::kBytes, maps.b, full, tile.column, step * kAtom,
                     g.b.batch_stride == 0 ? 0 : matrix);
      if (++step == plan.term_steps) {
        step = 0;
        ++matrix;
      }
    }
  }
  write_unit(header, round, {});
  ptx::let_next_grid_begin();  // the consumers still multiply and store
}

// Signals the producer that this warp has read a stage.
__device__ inline void release(ptx::Mbarrier& empty) {
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty);
}

// Accumulates a consumer's rows of a tile, from `row` on, over `steps` of the ring. Calls `next`
// once all steps have arrived.
template <class Gemm, class Next>
__device__ void accumulate(typename Gemm::Sums& sums, Sm90Header& header,
                           const unsigned char* stages, const GemmPlan& plan, int row, int steps,
                           Ring ring, Next next) {
  constexpr int kRowBlocks = Gemm::kRowBlocks;
  static_assert(kRowBlocks <= 2);
  for (int step = 0; step < steps; ++step, ring.advance(plan.stages)) {
    ptx::mbarrier_wait(header.full[ring.at], ring.parity);
    const unsigned char* const stage = stages + ring.at * Gemm::kTile.stage_bytes();
    const uint64_t a = Gemm::A::descriptor(stage, row);
    const uint64_t lower_a = Gemm::A::descriptor(stage, row + 64);
    const uint64_t b = Gemm::B::descriptor(stage + Gemm::A::kBytes, 0);
    ptx::wgmma_fence(sums);
#pragma unroll
    for (int i = 0; i < kAtom / 16; ++i) {
      const bool is_first = step == 0 && i == 0;
#pragma unroll
      for (int block = 0; block < kRowBlocks; ++block)
        Gemm::multiply(sums, block,
                       ptx::wgmma_advance(block == 0 ? a : lower_a, i * Gemm::A::kAdvance),
                       ptx::wgmma_advance(b, i * Gemm::B::kAdvance), !is_first);
    }
    ptx::wgmma_commit();
    // Only this step's wgmmas may be pending, so that the tensor cores stay busy. The previous
    // step's stage is free.
    ptx::wgmma_wait<1>();
    if (step > 0) release(header.empty[ring.before(1, plan.stages)]);
  }
  next();
  ptx::wgmma_wait<0>(sums);
  release(header.empty[ring.before(1, plan.stages)]);
}

}  // namespace amp_ext
