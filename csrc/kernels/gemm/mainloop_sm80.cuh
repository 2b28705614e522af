// The sums of a block's tile, by mma.sync: cp.async fills a ring of stages, ldmatrix takes fragments
// from it, always one step of 16 ahead of the tensor cores.
#pragma once

#include "operand.cuh"
#include "scheduler.cuh"

namespace amp_ext {

// One instance of the kernel.
template <class T, int kTileIndex, Major kA, Major kB>
struct GemmInstance {
  using Element = T;
  static constexpr GemmTile kTile = kGemmTiles[kTileIndex];
  using WalkA = OperandWalk<kTile.m, kTile.k, kA>;
  using WalkB = OperandWalk<kTile.n, kTile.k, kB>;

  struct Stage {
    typename WalkA::Tile a;
    typename WalkB::Tile b;
  };

  // A warp's part of the tile in the parts of 16x8 that one instruction adds to.
  static constexpr int kRowParts = kTile.warp_m() / 16;
  static constexpr int kColumnParts = kTile.warp_n() / 8;
  using Sums = float[kRowParts][kColumnParts][4];

  // Where the calling thread's warp is in the tile.
  __device__ static int warp_row() {
    return threadIdx.x / 32 / kTile.warps_n * kTile.warp_m();
  }
  __device__ static int warp_column() {
    return threadIdx.x / 32 % kTile.warps_n * kTile.warp_n();
  }
};

// The steps of both operands, from the first of a block's share on; they pass through the terms.
template <class Gemm>
class GemmSteps {
 public:
  __device__ GemmSteps(const GemmArgs& g, const GemmPlan& plan, const GemmWork& work)
      : a_(g.a, g.a.row_stride, g.a.column_stride, int64_t{work.m} * kTile.m, g.m),
        b_(g.b, g.b.column_stride, g.b.row_stride, int64_t{work.n} * kTile.n, g.n),
        k_(g.k),
        left_(work.end - work.begin) {
    if (left_ == 0) return;
    const int64_t term = work.begin / plan.term_steps;
    matrix_ = work.batch * g.terms + term;
    go_to((work.begin - term * plan.term_steps) * kTile.k);
  }

  // Fetches the next step, if there is one, as a group of copies. A group for every step, empty
  // ones behind the last, so that whoever counts them needs not know.
  __device__ void fetch(typename Gemm::Stage& stage) {
    if (left_ > 0) {
      const int depth = static_cast<int>(k_left_ < kTile.k ? k_left_ : kTile.k);
      a_.template fetch<kTile.threads(), kTile.aligned>(stage.a, depth);
      b_.template fetch<kTile.threads(), kTile.aligned>(stage.b, depth);
      advance();
    }
    ptx::cp_async_commit();
  }

 private:
  static constexpr GemmTile kTile = Gemm::kTile;

  __device__ void go_to(int64_t k) {
    a_.go_to(matrix_, k);
    b_.go_to(matrix_, k);
    k_left_ = k_ - k;
  }

  __device__ void advance() {
    --left_;
    k_left_ -= kTile.k;
    if (k_left_ > 0) {
      a_.advance();
      b_.advance();
    } else {
      ++matrix_;
      go_to(0);
    }
  }

  typename Gemm::WalkA a_;
  typename Gemm::WalkB b_;
  const int64_t k_;
  int64_t left_;    // steps
  int64_t k_left_;  // of the present matrix
  int64_t matrix_;
};

// A warp's fragments of 16 along k.
template <class Gemm>
struct GemmFragments {
  Fragment a[Gemm::kRowParts];
  Fragment b[Gemm::kColumnParts / 2];

  __device__ void load(typename Gemm::Stage& stage, int k) {
#pragma unroll
    for (int i = 0; i < Gemm::kRowParts; ++i) stage.a.load(a[i], Gemm::warp_row() + i * 16, k);
#pragma unroll
    for (int j = 0; j < Gemm::kColumnParts / 2; ++j)
      stage.b.load(b[j], Gemm::warp_column() + j * 16, k);
  }

  __device__ void multiply(typename Gemm::Sums& sums) const {
#pragma unroll
    for (int i = 0; i < Gemm::kRowParts; ++i) {
#pragma unroll
      for (int j = 0; j < Gemm::kColumnParts; ++j) {
        const uint32_t b_part[2] = {b[j / 2][j % 2], b[j / 2][j % 2 + 2]};
        ptx::mma_m16n8k16<typename Gemm::Element>(sums[i][j], a[i], b_part);
      }
    }
  }
};

// Adds the products of a block's steps. The stages are free again afterwards.
template <class Gemm>
__device__ void accumulate(typename Gemm::Sums& sums,
                           typename Gemm::Stage (&stages)[Gemm::kTile.stages],
                           const GemmArgs& g, const GemmPlan& plan, const GemmWork& work) {
  constexpr int kStages = Gemm::kTile.stages;
  constexpr int kDepths = Gemm::kTile.k / 16;
  static_assert(kDepths % 2 == 0, "fragments of even and odd depths take turns in registers");

  GemmSteps<Gemm> steps(g, plan, work);
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) steps.fetch(stages[stage]);
  // All of this thread's copies but those of the steps after the first one have come; behind the
  // barrier, so have the other threads'.
  ptx::cp_async_wait<kStages - 2>();
  ptx::block_sync();
  GemmFragments<Gemm> fragments[2];
  fragments[0].load(stages[0], 0);

  int stage = 0, last = kStages - 1;  // that of this step and that of the step before it
  for (int64_t step = work.begin; step < work.end; ++step) {
#pragma unroll
    for (int depth = 0; depth < kDepths; ++depth) {
      if (depth == kDepths - 1) {
        // Nobody reads this stage any more: what is left of it is in registers. The next one has
        // come.
        ptx::cp_async_wait<kStages - 2>();
        ptx::block_sync();
        last = stage;
        stage = stage + 1 == kStages ? 0 : stage + 1;
      }
      // Behind the last step this loads what is not used.
      fragments[(depth + 1) % 2].load(stages[stage], (depth + 1) % kDepths * 16);
      if (depth == 0) steps.fetch(stages[last]);
      fragments[depth % 2].multiply(sums);
    }
  }
  ptx::cp_async_wait<0>();
  ptx::block_sync();
}

}  // namespace amp_ext
