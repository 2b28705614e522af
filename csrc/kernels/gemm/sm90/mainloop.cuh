// Sums a tile on Hopper. One thread issues TMA loads of 64 along k into a ring of stages, across
// all tiles of the block, and the consumers multiply them by wgmma.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "amp_ext/gemm.h"
#include "header.cuh"

namespace amp_ext {

constexpr int kAtom = Sm90Tile::kStep;  // elements in a swizzled row of 128 bytes

// The tensor maps of a launch. `side` is c or aux.
struct Sm90Maps {
  CUtensorMap a;
  CUtensorMap b;
  CUtensorMap out;
  CUtensorMap side;
};

// A step of an operand in shared memory, with kExtent of m or n. Lines are contiguous as in global
// memory, and lie in swizzled rows of 64 elements, or of 32 if 64 do not divide the extent.
template <int kExtent, Major kMajor>
struct Sm90Operand {
  static constexpr bool kByK = kMajor == Major::k;
  static constexpr int kRow = kByK || kExtent % kAtom == 0 ? kAtom : kAtom / 2;
  static constexpr int kRowBytes = kRow * 2;
  static constexpr int kLines = kByK ? kExtent : kAtom;
  static constexpr int kParts = kByK ? 1 : kExtent / kRow;
  static constexpr int kPartBytes = kLines * kRowBytes;
  static constexpr int kBytes = kParts * kPartBytes;
  // The descriptor's advance in bytes for the next 16 of k: within rows, or by whole rows.
  static constexpr int kAdvance = kByK ? 32 : 16 * kRowBytes;

  // Starts to load the step at index `mn` of m or n and `k` of matrix z: all lines, or one half of
  // them to both blocks of the cluster.
  __device__ static void fetch(unsigned char* to, const CUtensorMap& map, ptx::Mbarrier& full,
                               int mn, int k, int z, int shares, int share) {
    const bool is_lower = shares > 1 && share > 0;
    const int x = kByK ? k : mn, y = (kByK ? mn : k) + (is_lower ? kLines / 2 : 0);
    if (is_lower) to += kPartBytes / 2;
    for (int part = 0; part < kParts; ++part) {
      unsigned char* const box = to + part * kPartBytes;
      if (shares == 1)
        ptx::tma_load(box, map, full, x + part * kRow, y, z);
      else
        ptx::tma_load_multicast(box, map, full, x + part * kRow, y, z, 0b11);
    }
  }

  // Describes the step from index `mn`, a multiple of 64.
  __device__ static uint64_t descriptor(const unsigned char* step, int mn) {
    const int offset = kByK ? mn * kRowBytes : mn / kRow * kPartBytes;
    constexpr int kLeading = kByK ? 16 : kPartBytes;
    return ptx::wgmma_descriptor<kRowBytes>(step + offset, kLeading, 8 * kRowBytes);
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

template <class Gemm>
__device__ BlockTile block_tile(const GemmArgs& g, const GemmPlan& plan, const GemmWork& work) {
  const int rank = plan.cluster_m * plan.cluster_n > 1 ? ptx::cluster_rank() : 0;
  const int m = work.m * plan.cluster_m + (plan.cluster_m > 1 ? rank : 0);
  const int n = work.n * plan.cluster_n + (plan.cluster_n > 1 ? rank : 0);
  BlockTile tile{static_cast<int>(work.batch), m * Gemm::kTile.m, n * Gemm::kTile.n};
  tile.inside = tile.row < g.m && tile.column < g.n;
  return tile;
}

// Loads the steps of all of the block's units by one thread, and publishes each unit.
template <class Gemm>
__device__ void produce(Sm90Header& header, unsigned char* stages, const Sm90Maps& maps,
                        const GemmArgs& g, const GemmPlan& plan) {
  const int cluster = plan.cluster_m * plan.cluster_n;
  const int rank = cluster > 1 ? ptx::cluster_rank() : 0;
  const int a_shares = plan.cluster_n, a_share = a_shares > 1 ? rank : 0;
  const int b_shares = plan.cluster_m, b_share = b_shares > 1 ? rank : 0;
  Ring ring;
  uint32_t round = 0;
  for (uint32_t unit = ptx::block_index() / cluster; unit < plan.units;
       unit += plan.blocks / cluster, ++round) {
    const GemmWork work = work_of(plan, unit);
    const BlockTile tile = block_tile<Gemm>(g, plan, work);
    write_unit(header, round, {work, tile, ring});
    int matrix = static_cast<int>(work.matrix), step = work.step;
    for (int i = 0; i < work.steps; ++i, ring.advance(plan.stages)) {
      ptx::Mbarrier& full = header.full[ring.at];
      unsigned char* const stage = stages + ring.at * Gemm::kTile.stage_bytes();
      // Waits until all blocks have read the stage's previous contents; the first round does not
      // wait.
      ptx::mbarrier_wait(header.empty[ring.at], ring.parity ^ 1);
      // Expects the bytes of the whole stage, including those from the other block of the cluster.
      ptx::mbarrier_arrive_expect_tx(full, Gemm::kTile.stage_bytes());
      Gemm::A::fetch(stage, maps.a, full, tile.row, step * kAtom,
                     g.a.batch_stride == 0 ? 0 : matrix, a_shares, a_share);
      Gemm::B::fetch(stage + Gemm::A::kBytes, maps.b, full, tile.column, step * kAtom,
                     g.b.batch_stride == 0 ? 0 : matrix, b_shares, b_share);
      if (++step == plan.term_steps) {
        step = 0;
        ++matrix;
      }
    }
  }
  write_unit(header, round, {});
  ptx::let_next_grid_begin();  // the consumers still multiply and store
  // The barriers must outlive the other block's arrivals.
  if (cluster > 1)
    for (int i = 0; i < plan.stages; ++i, ring.advance(plan.stages))
      ptx::mbarrier_wait(header.empty[ring.at], ring.parity ^ 1);
}

// Signals all producers that copy to this stage that this warp has read it.
__device__ inline void release(ptx::Mbarrier& empty, int cluster) {
  const int lane = threadIdx.x % 32;
  if (cluster == 1) {
    if (lane == 0) ptx::mbarrier_arrive(empty);
  } else if (lane < cluster) {
    ptx::mbarrier_arrive_cluster(empty, lane);
  }
}

// Accumulates a consumer's rows of a tile, from `row` on, over `steps` of the ring. Calls `next`
// once all steps have arrived.
template <class Gemm, class Next>
__device__ void accumulate(typename Gemm::Sums& sums, Sm90Header& header,
                           const unsigned char* stages, const GemmPlan& plan, int row, int steps,
                           Ring ring, Next next) {
  const int cluster = plan.cluster_m * plan.cluster_n;
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
    if (step > 0) release(header.empty[ring.before(1, plan.stages)], cluster);
  }
  next();
  ptx::wgmma_wait<0>(sums);
  release(header.empty[ring.before(1, plan.stages)], cluster);
}

}  // namespace amp_ext
