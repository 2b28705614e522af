// Combines the sums of tiles that are split along k, in the workspace.
#pragma once

#include <cstdint>
#include <cstring>
#include <ptx/common.cuh>

namespace amp_ext {

// Stores a share of the sums that kThreads threads hold: part number `part` of the result. The last
// share to be stored adds all shares in order, and returns true with the total in `sums`.
// `is_last()` synchronises the threads, and counts the shares. The workspace interleaves packs of
// four sums of neighbouring threads.
template <int kThreads, class Sums, class IsLast>
__device__ bool add_shares(Sums& sums, unsigned char* workspace, uint32_t part, uint32_t share,
                           uint32_t shares, int thread, IsLast is_last) {
  constexpr int kPacks = sizeof(Sums) / sizeof(uint4);
  constexpr int kBatch = kPacks < 8 ? kPacks : 8;  // packs loaded at a time, as registers allow
  static_assert(kPacks % kBatch == 0);
  auto& numbers = reinterpret_cast<float (&)[kPacks * 4]>(sums);
  const auto packs = [&](uint32_t of) {
    const int64_t first = (int64_t{part} * shares + of) * kPacks * kThreads;
    return reinterpret_cast<uint4*>(workspace) + first + thread;
  };
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    uint4 bits;
    memcpy(&bits, &numbers[4 * i], sizeof(bits));
    ptx::store16(packs(share) + i * kThreads, bits);
  }
  if (!is_last()) return false;
#pragma unroll
  for (int first = 0; first < kPacks; first += kBatch) {
#pragma unroll
    for (int i = 0; i < kBatch * 4; ++i) numbers[4 * first + i] = 0;
#pragma unroll 1
    for (uint32_t of = 0; of < shares; ++of) {
      const uint4* const from = packs(of) + first * kThreads;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const uint4 bits = ptx::load_l2(from + i * kThreads);
        float values[4];
        memcpy(values, &bits, sizeof(bits));
#pragma unroll
        for (int j = 0; j < 4; ++j) numbers[4 * (first + i) + j] += values[j];
      }
    }
  }
  return true;
}

}  // namespace amp_ext
