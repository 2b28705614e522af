// Sums a block's tile by mma.sync. cp.async fills a ring of stages, and ldmatrix reads fragments
// one step of 16 ahead of the tensor cores.
#pragma once

#include "gemm/shared/scheduler.cuh"
#include "operand.cuh"

namespace amp_ext {

// An instance of the kernel.
template <class T, int kTileIndex, Major kA, Major kB>
struct GemmInstance {
  using Element = T;
  static constexpr GemmTile kTile = kGemmTiles[kTileIndex];
  using WalkA = OperandWalk<kTile.m, kTile.k, kA, kTile.threads()>;
  using WalkB = OperandWalk<kTile.n, kTile.k, kB, kTile.threads()>;
  using ReaderA = FragmentReader<Role::a, kTile.m, kTile.k, kA>;
  using ReaderB = FragmentReader<Role::b, kTile.n, kTile.k, kB>;

  struct Stage {
    typename WalkA::Tile a;
    typename WalkB::Tile b;
  };

  // A warp's part of the tile, in 16x8 blocks that one instruction accumulates.
  static constexpr int kRowParts = kTile.warp_m() / 16;
  static constexpr int kColumnParts = kTile.warp_n() / 8;
  using Sums = float[kRowParts][kColumnParts][4];

  // The position of the calling thread's warp in the tile.
  __device__ static int warp_row() { return threadIdx.x / 32 / kTile.warps_n * kTile.warp_m(); }
  __device__ static int warp_column() { return threadIdx.x / 32 % kTile.warps_n * kTile.warp_n(); }
};

// Walks both operands from the first step of a block's share, across the terms.
template <class Gemm>
class GemmSteps {
 public:
  __device__ GemmSteps(const GemmArgs& g, const GemmPlan& plan, const GemmWork& work)
      : a_(g.a, g.a.row_stride, g.a.column_stride, int64_t{work.m} * kTile.m, g.m, work.matrix,
           int64_t{work.step} * kTile.k),
        b_(g.b, g.b.column_stride, g.b.row_stride, int64_t{work.n} * kTile.n, g.n, work.matrix,
           int64_t{work.step} * kTile.k),
        k_(static_cast<int>(g.k)),
        of_matrix_(plan.term_steps),
        left_(work.steps),
        k_left_(k_ - work.step * kTile.k) {}

  // Fetches the next step as one group of copies. Past the last step the group is empty, so that
  // waits can count groups.
  __device__ void fetch(typename Gemm::Stage& stage) {
    if (left_ > 0) {
      const int depth = k_left_ < kTile.k ? k_left_ : kTile.k;
      a_.template fetch<kTile.aligned>(stage.a, depth);
      b_.template fetch<kTile.aligned>(stage.b, depth);
      advance();
    }
    ptx::cp_async_commit();
  }

 private:
  static constexpr GemmTile kTile = Gemm::kTile;

  __device__ void advance() {
    --left_;
    k_left_ -= kTile.k;
    if (k_left_ > 0) {
      a_.advance();
      b_.advance();
    } else {
      a_.advance_matrix(of_matrix_);
      b_.advance_matrix(of_matrix_);
      k_left_ = k_;
    }
  }

  typename Gemm::WalkA a_;
  typename Gemm::WalkB b_;
  const int k_;
  const int of_matrix_;  // steps
  int left_;             // steps
  int k_left_;           // of the current matrix
};

// A warp's fragments for 16 of k.
template <class Gemm>
struct GemmFragments {
  Fragment a[Gemm::kRowParts];
  Fragment b[Gemm::kColumnParts / 2];

  __device__ void multiply(typename Gemm::Sums& sums) const {
#pragma unroll
    for (int i = 0; i < Gemm::kRowParts; ++i) {
#pragma unroll
      for (int j = 0; j < Gemm::kColumnParts; ++j) {
        const uint32_t b_part[2] = {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]};
        ptx::mma_m16n8k16<typename Gemm::Element>(sums[i][j], a[i], b_part);
      }
    }
  }
};

// Accumulates the products of a block's steps. The stages are free afterwards.
template <class Gemm>
__device__ void accumulate(typename Gemm::Sums& sums,
                           typename Gemm::Stage (&stages)[Gemm::kTile.stages], const GemmArgs& g,
                           const GemmPlan& plan, const GemmWork& work) {
  constexpr int kStages = Gemm::kTile.stages;
  constexpr int kDepths = Gemm::kTile.k / 16;
  static_assert(kDepths % 2 == 0, "fragments of even and odd depths take turns in registers");

  GemmSteps<Gemm> steps(g, plan, work);
  ptx::wait_for_previous_grid();
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) steps.fetch(stages[stage]);
  // The first step's copies of this thread have arrived; after the barrier, so have all threads'.
  ptx::cp_async_wait<kStages - 2>();
  ptx::block_sync();

  const typename Gemm::ReaderA reader_a(Gemm::warp_row());
  const typename Gemm::ReaderB reader_b(Gemm::warp_column());
  GemmFragments<Gemm> fragments[2];
  const auto read = [&](int stage, int depth) {
    auto& to = fragments[depth % 2];
#pragma unroll
    for (int i = 0; i < Gemm::kRowParts; ++i) reader_a.read(to.a[i], stages[stage].a, i, depth);
#pragma unroll
    for (int j = 0; j < Gemm::kColumnParts / 2; ++j)
      reader_b.read(to.b[j], stages[stage].b, j, depth);
  };
  read(0, 0);

  int stage = 0, last = kStages - 1;  // the stages of this step and of the previous one
  for (int step = 0; step < work.steps; ++step) {
#pragma unroll
    for (int depth = 0; depth < kDepths; ++depth) {
      if (depth == kDepths - 1) {
        // The rest of this stage is in registers, so no thread reads it again. The next stage has
        // arrived.
        ptx::cp_async_wait<kStages - 2>();
        ptx::block_sync();
        last = stage;
        stage = stage + 1 == kStages ? 0 : stage + 1;
      }
      // The last step reads a fragment that remains unused.
      read(stage, (depth + 1) % kDepths);
      if (depth == 0) steps.fetch(stages[last]);
      fragments[depth % 2].multiply(sums);
    }
  }
  ptx::block_sync();
}

}  // namespace amp_ext
