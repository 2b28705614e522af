// Stages the bias for the consumers: a producer warp loads each tile's columns ahead, as fp32.
#pragma once

#include "amp_ext/gemm.h"
#include "element.cuh"
#include "header.cuh"

namespace amp_ext {

// Stages the bias of all of the block's tiles, by one warp.
template <class Gemm>
__device__ void stage_bias(Sm90Header& header, const GemmArgs& g) {
  constexpr int kWarp = 32, kColumns = Gemm::kTile.n / kWarp;  // per lane
  const int lane = threadIdx.x % kWarp;
  for (uint32_t round = 0;; ++round) {
    const Sm90Unit unit = read_unit(header, round);
    if (unit.steps == 0) return;
    float bias[kColumns];
    with_type(g.bias.dtype, [&](auto zero) {
      using T = decltype(zero);
      const T* const from = static_cast<const T*>(ptx::global(g.bias.data));
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const int column = unit.tile.column + i * kWarp + lane;
        bias[i] = column < g.n ? Element<T>::widen(from[column]) : 0.0f;
      }
    });
    const uint32_t at = round % Sm90Header::kBiases, lap = round / Sm90Header::kBiases;
    ptx::mbarrier_wait(header.bias_empty[at], lap % 2 ^ 1);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) header.bias[at][i * kWarp + lane] = bias[i];
    ptx::warp_sync();
    if (lane == 0) ptx::mbarrier_arrive(header.bias_full[at]);
  }
}

// Holds the staged bias of a consumer's tile until destruction.
class StagedBias {
 public:
  __device__ StagedBias(Sm90Header& header, const GemmArgs& g, uint32_t round)
      : header_(header), exists_(g.bias.data), at_(round % Sm90Header::kBiases) {
    if (exists_) ptx::mbarrier_wait(header.bias_full[at_], round / Sm90Header::kBiases % 2);
  }
  StagedBias(const StagedBias&) = delete;
  __device__ ~StagedBias() {
    if (!exists_) return;
    ptx::warp_sync();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(header_.bias_empty[at_]);
  }

  // Returns null if the product has no bias.
  __device__ const float* columns() const { return exists_ ? header_.bias[at_] : nullptr; }

 private:
  Sm90Header& header_;
  const bool exists_;
  const uint32_t at_;
};

}  // namespace amp_ext
