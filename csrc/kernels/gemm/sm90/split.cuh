// Combines the sums of consumers that share a tile along k, in the workspace.
#pragma once

#include <cstring>

#include "mainloop.cuh"

namespace amp_ext {

// Returns the thread's index in its consumer. Each use recomputes it, to hold no register beside
// the sums.
__device__ inline int consumer_thread() { return ptx::thread_index() % kWarpgroup; }

// Waits for the 128 threads of one consumer and orders their memory accesses.
__device__ inline void consumer_sync(int consumer) {
  static_assert(Sm90Tile::kConsumers == 2);
  if (consumer == 0)
    ptx::barrier_sync<1, kWarpgroup>();
  else
    ptx::barrier_sync<2, kWarpgroup>();
}

// Does for consumers as is_last_block does for blocks.
__device__ inline bool is_last_consumer(uint32_t* ticket, uint32_t consumers, bool& shared,
                                        int consumer) {
  consumer_sync(consumer);
  if (consumer_thread() == 0) {
    ptx::device_fence();
    shared = ptx::ticket(ticket, consumers - 1) == consumers - 1;
    ptx::device_fence();
  }
  consumer_sync(consumer);
  return ptx::warp_uniform(shared);
}

// A consumer's share of a tile. The sums go to the workspace unless all other shares are there. The
// workspace interleaves packs of four sums of neighbouring threads.
template <class Gemm>
class Share {
 public:
  __device__ Share(Sm90Header& header, const GemmPlan& plan, const GemmWork& work, int consumer,
                   unsigned char* workspace, uint32_t* tickets)
      : header_(header),
        plan_(plan),
        work_(work),
        consumer_(consumer),
        workspace_(workspace),
        tickets_(tickets) {}

  // Checks in one thread whether all other shares are complete. The check overlaps with this
  // share's last wgmmas.
  __device__ void look() const {
    if (consumer_thread() != 0) return;
    header_.others_there[consumer_] = ptx::look(ticket()) == work_.shares - 1;
    ptx::device_fence();
  }

  // Returns whether this share is the last. A share that is not last stores its sums. Call look()
  // before.
  __device__ bool is_last(const typename Gemm::Sums& sums) const {
    consumer_sync(consumer_);
    if (!ptx::warp_uniform(header_.others_there[consumer_])) {
      store(sums);
      return is_last_consumer(ticket(), work_.shares, header_.last[consumer_], consumer_);
    }
    if (consumer_thread() == 0) ptx::ticket(ticket(), work_.shares - 1);
    consumer_sync(consumer_);  // all threads have read the flag that the next look() writes
    return true;
  }

  // Adds the shares in order.
  __device__ void add_up(typename Gemm::Sums& sums) const {
#pragma unroll
    for (int i = 0; i < Gemm::kRowBlocks; ++i) add_up(sums[i], i);
  }

 private:
  static constexpr int kRowPacks = Gemm::kTile.n / 8;
  // Packs loaded at a time, as registers allow: beside the sums, or beside a second set of sums.
  static constexpr int kBehind = 8, kBefore = 7;

  // Returns the index of a tile or share among all consumers.
  __device__ uint32_t index(uint32_t number) const {
    return number * Gemm::kTeam + (Gemm::kTeam > 1 ? consumer_ : 0);
  }

  __device__ uint32_t* ticket() const { return tickets_ + index(work_.tile - plan_.whole); }

  // Returns the address of this thread's first pack of a share, in a block of rows.
  __device__ uint4* packs(uint32_t share, int row_block) const {
    const int64_t row = int64_t{index(work_.slot + share)} * Gemm::kRowBlocks + row_block;
    return reinterpret_cast<uint4*>(workspace_) + row * (kRowPacks * kWarpgroup) +
           consumer_thread();
  }

  __device__ void store(const typename Gemm::Sums& sums) const {
    uint4* const to = packs(work_.share, 0);
#pragma unroll
    for (int i = 0; i < Gemm::kRowBlocks * kRowPacks; ++i) {
      uint4 bits;
      memcpy(&bits, &sums[i / kRowPacks][i % kRowPacks * 4], sizeof(bits));
      ptx::store16(to + i * kWarpgroup, bits);
    }
  }

  // Adds the shares of a block of rows. The sum of earlier shares precedes this share's, which is
  // in registers.
  __device__ __forceinline__ void add_up(float (&row)[kRowPacks * 4], int row_block) const {
#pragma unroll
    for (int first = 0; first < kRowPacks; first += kBefore) {
      float before[kBefore * 4] = {};
      add<kBefore>(before, 0, work_.share, row_block, first);
#pragma unroll
      for (int i = 0; i < kBefore * 4; ++i)
        if (first * 4 + i < kRowPacks * 4) row[first * 4 + i] += before[i];
    }
#pragma unroll
    for (int first = 0; first < kRowPacks; first += kBehind)
      add<kBehind>(row + first * 4, work_.share + 1, work_.shares, row_block, first);
  }

  // Adds up to kCount packs of the shares in [share, end).
  template <int kCount>
  __device__ __forceinline__ void add(float* sums, uint32_t share, uint32_t end, int row_block,
                                      int first) const {
#pragma unroll 1
    for (; share < end; ++share) {
      const uint4* const from = packs(share, row_block) + first * kWarpgroup;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (first + i >= kRowPacks) continue;
        const uint4 bits = ptx::load_l2(from + i * kWarpgroup);
        float of_share[4];
        memcpy(of_share, &bits, sizeof(bits));
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i * 4 + j] += of_share[j];
      }
    }
  }

  Sm90Header& header_;
  const GemmPlan& plan_;
  const GemmWork& work_;
  const int consumer_;
  unsigned char* const workspace_;
  uint32_t* const tickets_;
};

}  // namespace amp_ext
