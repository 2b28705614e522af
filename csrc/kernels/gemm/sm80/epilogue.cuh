// Turns a block's sums into the result: scaling, c, bias, rounding.
#pragma once

#include "mainloop.cuh"
#include "vector8.cuh"

namespace amp_ext {

template <class Gemm>
struct EpilogueShared {
  static constexpr GemmTile kTile = Gemm::kTile;
  static constexpr int kWarps = kTile.warps_m * kTile.warps_n;

  // Some rows of each warp's part of the tile. The padding avoids bank conflicts.
  alignas(16) float staged[kWarps][kTile.staged_rows()][kTile.warp_n() + kVector];
  bool last;
};

// Finishes eight elements of the result.
__device__ inline void finish_vector(const GemmArgs& g, const VectorPlace& place,
                                     const float (&bias)[kVector], float (&x)[kVector]) {
  const float alpha = static_cast<float>(g.alpha), beta = static_cast<float>(g.beta);
  float other[kVector] = {};
  if (g.c.data) load_vector(other, g.c, place);
#pragma unroll
  for (int i = 0; i < kVector; ++i) x[i] = alpha * x[i] + beta * other[i] + bias[i];
  store_vector(g.out, place, x);
}

// Writes the result of a tile. All threads take part, and shared memory is free beforehand.
template <class Gemm>
__device__ void finish(typename Gemm::Sums& sums, EpilogueShared<Gemm>& shared, const GemmArgs& g,
                       const GemmWork& work) {
  constexpr GemmTile kTile = Gemm::kTile;
  // A warp's pass covers as many rows as its lanes hold vectors of eight elements.
  constexpr int kVectors = kTile.warp_n() / kVector, kPassRows = 32 / kVectors;
  constexpr int kStagedParts = kTile.staged_rows() / 16;
  const int lane = threadIdx.x % 32, lane_row = lane / kVectors, vector = lane % kVectors;
  auto& staged = shared.staged[threadIdx.x / 32];

  const int64_t first_row = int64_t{work.m} * kTile.m + Gemm::warp_row();
  const int64_t column = int64_t{work.n} * kTile.n + Gemm::warp_column() + vector * kVector;
  const int64_t left = g.n - column;
  const int count = left < 0 ? 0 : left < kVector ? static_cast<int>(left) : kVector;

  float bias[kVector] = {};
  if (g.bias.data) load_vector(bias, row_of(g.bias), {0, 0, column, count});
#pragma unroll 1
  for (int stage = 0; stage < kTile.warp_m(); stage += kTile.staged_rows()) {
    ptx::warp_sync();
#pragma unroll
    for (int i = 0; i < kStagedParts; ++i) {
#pragma unroll
      for (int j = 0; j < Gemm::kColumnParts; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float* to = &staged[i * 16 + lane / 4 + half * 8][j * 8 + lane % 4 * 2];
          *reinterpret_cast<float2*>(to) = {sums[i][j][half * 2], sums[i][j][half * 2 + 1]};
        }
      }
    }
    // Moves the remaining sums down, since registers need constant indices. The copies are per
    // element: for targets below 10.0 nvcc miscompiles a memcpy within an array.
#pragma unroll
    for (int i = kStagedParts; i < Gemm::kRowParts; ++i)
#pragma unroll
      for (int j = 0; j < Gemm::kColumnParts; ++j)
#pragma unroll
        for (int l = 0; l < 4; ++l) sums[i - kStagedParts][j][l] = sums[i][j][l];
    ptx::warp_sync();
#pragma unroll 1
    for (int i = lane_row; i < kTile.staged_rows(); i += kPassRows) {
      const int64_t row = first_row + stage + i;
      if (row >= g.m || count == 0) continue;
      float x[kVector];
      memcpy(x, &staged[i][vector * kVector], sizeof(x));
      finish_vector(g, {work.batch, row, column, count}, bias, x);
    }
  }
}

}  // namespace amp_ext
