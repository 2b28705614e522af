// Turns a block's sums into the result: scaling, c, bias, activation or derivative, rounding,
// column sums.
#pragma once

#include "gemm/shared/activation.cuh"
#include "mainloop.cuh"
#include "reduce.cuh"
#include "vector8.cuh"

namespace amp_ext {

template <class Gemm>
struct EpilogueShared {
  static constexpr GemmTile kTile = Gemm::kTile;
  static constexpr int kWarps = kTile.warps_m * kTile.warps_n;
  static constexpr int kGroups = kTile.threads() / (kTile.n / 4);

  union {
    // Some rows of each warp's part of the tile. The padding avoids bank conflicts.
    float staged[kWarps][kTile.staged_rows()][kTile.warp_n() + kVector];
    float column_sums[kTile.warps_m][kTile.n];
    float4 grid_sums[kGroups][kTile.n / 4];
  };
  bool last;
};

// Finishes eight elements of the result; x receives the values before rounding.
__device__ inline void finish_vector(const GemmArgs& g, const VectorPlace& place,
                                     const float (&bias)[kVector], float (&x)[kVector]) {
  const float alpha = static_cast<float>(g.alpha), beta = static_cast<float>(g.beta);
  float other[kVector] = {};
  if (g.c.data) load_vector(other, g.c, place);
#pragma unroll
  for (int i = 0; i < kVector; ++i) x[i] = alpha * x[i] + beta * other[i] + bias[i];
  if (g.derivative) {
    load_vector(other, g.aux, place);
    multiply_by_derivative(g.activation, other, x);
  } else {
    if (g.aux.data) store_vector(g.aux, place, x);
    activate(g.activation, x);
  }
  store_vector(g.out, place, x);
}

// Sums each column over the block's rows, then over all blocks in the last block of a column of
// tiles. The order is fixed. All threads take part.
template <class Gemm>
__device__ void sum_columns(float (&sums)[kVector], EpilogueShared<Gemm>& shared, const GemmArgs& g,
                            const GemmPlan& plan, const GemmWork& work, float* workspace,
                            uint32_t* ticket) {
  constexpr GemmTile kTile = Gemm::kTile;
  constexpr int kVectors = kTile.warp_n() / kVector, kQuads = kTile.n / 4;
  constexpr int kGroups = EpilogueShared<Gemm>::kGroups;
  const int thread = threadIdx.x, lane = thread % 32;
#pragma unroll
  for (int i = 0; i < kVector; ++i)
    for (int mask = kVectors; mask < 32; mask *= 2) sums[i] += ptx::shuffle_xor(sums[i], mask);
  ptx::block_sync();  // all staged sums have been read
  if (lane < kVectors) {
    float* to = shared.column_sums[Gemm::warp_row() / kTile.warp_m()] + Gemm::warp_column();
    for (int i = 0; i < kVector; ++i) to[lane * kVector + i] = sums[i];
  }
  ptx::block_sync();

  const int64_t width = int64_t{plan.tiles_n} * kTile.n, first = int64_t{work.n} * kTile.n;
  const int64_t rows = plan.units / plan.splits / plan.tiles_n;  // rows of tiles of all matrices
  const int64_t row = work.batch * plan.tiles_m + work.m;
  for (int column = thread; column < kTile.n; column += kTile.threads()) {
    float sum = 0;
    for (int i = 0; i < kTile.warps_m; ++i) sum += shared.column_sums[i][column];
    workspace[row * width + first + column] = sum;
  }
  ptx::block_sync();
  if (!is_last_block(ticket, static_cast<uint32_t>(rows), shared.last)) return;

  const int quad = thread % kQuads, group = thread / kQuads;
  float4 sum = {};
  for (int64_t i = group; i < rows; i += kGroups) {
    const float4 more =
        ptx::load_l2(reinterpret_cast<const float4*>(workspace + i * width + first) + quad);
    sum = {sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
  }
  shared.grid_sums[group][quad] = sum;
  ptx::block_sync();
  for (int column = thread; column < kTile.n; column += kTile.threads()) {
    float total = 0;
    for (int i = 0; i < kGroups; ++i)
      total += reinterpret_cast<const float*>(shared.grid_sums[i])[column];
    if (first + column < g.n) static_cast<float*>(g.column_sums)[first + column] = total;
  }
}

// Writes the result of a tile. All threads take part, and shared memory is free beforehand.
template <class Gemm>
__device__ void finish(typename Gemm::Sums& sums, EpilogueShared<Gemm>& shared, const GemmArgs& g,
                       const GemmPlan& plan, const GemmWork& work, unsigned char* workspace,
                       uint32_t* tickets) {
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
  const int64_t rows = g.batch == 0 ? 0 : g.m;

  float bias[kVector] = {}, column_sums[kVector] = {};
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
      if (row >= rows || count == 0) continue;
      float x[kVector];
      memcpy(x, &staged[i][vector * kVector], sizeof(x));
      finish_vector(g, {work.batch, row, column, count}, bias, x);
#pragma unroll
      for (int j = 0; j < kVector; ++j) column_sums[j] += x[j];
    }
  }
  if (g.column_sums)
    sum_columns(column_sums, shared, g, plan, work,
                reinterpret_cast<float*>(workspace + plan.column_sums_offset),
                tickets + plan.column_tickets + work.n);
}

}  // namespace amp_ext
