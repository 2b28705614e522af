// The threads of a consumer, and tiles whose steps along k several blocks share: consumers' sums
// meet in the workspace.
#pragma once

#include <cstring>

#include "mainloop.cuh"

namespace amp_ext {

// The calling thread's number in its consumer. Read anew: nothing that follows from it is held in
// registers beside the sums.
__device__ inline int consumer_thread() { return ptx::thread_index() % kWarpgroup; }

// Waits for the 128 threads of one consumer; orders their memory accesses.
__device__ inline void consumer_sync(int consumer) {
  static_assert(Sm90Tile::kConsumers == 2);
  if (consumer == 0)
    ptx::barrier_sync<1, kWarpgroup>();
  else
    ptx::barrier_sync<2, kWarpgroup>();
}

// As is_last_block, of consumers.
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

// A consumer's sums of each of a tile's shares, in the workspace: a thread's in packs of four,
// those of neighbours side by side.
template <class Gemm>
class Shares {
 public:
  __device__ Shares(const GemmPlan& plan, const GemmWork& work, int consumer,
                    unsigned char* workspace)
      : plan_(plan),
        workspace_(workspace),
        tile_(work.tile - plan.whole),
        member_(Gemm::kTeam > 1 ? consumer : 0),
        slot_(work.slot),
        count_(work.shares) {}

  // That of this consumer's ticket.
  __device__ uint32_t number() const { return index(tile_); }

  __device__ void store(const typename Gemm::Sums& sums, uint32_t share) const {
    uint4* const to = packs(share);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      uint4 bits;
      memcpy(&bits, &sums[i * 4 / kRowSums][i * 4 % kRowSums], sizeof(bits));
      ptx::store16(to + i * kWarpgroup, bits);
    }
  }

  // Adds the shares up, in their order.
  __device__ void add_up(typename Gemm::Sums& sums) const {
    constexpr int kAtATime = 8;  // packs, for which there are registers beside the sums
    memset(&sums, 0, sizeof(sums));
#pragma unroll
    for (int first = 0; first < kPacks; first += kAtATime) {
#pragma unroll 1
      for (uint32_t share = 0; share < count_; ++share) {
        const uint4* const from = packs(share);
#pragma unroll
        for (int i = first; i < kPacks && i < first + kAtATime; ++i) {
          const uint4 bits = ptx::load_l2(from + i * kWarpgroup);
          float of_share[4];
          memcpy(of_share, &bits, sizeof(bits));
#pragma unroll
          for (int j = 0; j < 4; ++j) sums[i * 4 / kRowSums][i * 4 % kRowSums + j] += of_share[j];
        }
      }
    }
  }

 private:
  static constexpr int kRowSums = Gemm::kTile.n / 2;
  static constexpr int kPacks = Gemm::kRowBlocks * kRowSums / 4;

  // Of a tile or a share, among the consumers of all blocks of a cluster that have some of it.
  __device__ uint32_t index(uint32_t number) const {
    const uint32_t cluster = plan_.cluster_m * plan_.cluster_n;
    const uint32_t rank = cluster > 1 ? ptx::cluster_rank() : 0;
    return (number * cluster + rank) * Gemm::kTeam + member_;
  }

  // The first of this thread's packs of a share.
  __device__ uint4* packs(uint32_t share) const {
    return reinterpret_cast<uint4*>(workspace_) +
           int64_t{index(slot_ + share)} * (kPacks * kWarpgroup) + consumer_thread();
  }

  const GemmPlan& plan_;
  unsigned char* const workspace_;
  const uint32_t tile_;
  const int member_;
  const uint32_t slot_;
  const uint32_t count_;
};

}  // namespace amp_ext
