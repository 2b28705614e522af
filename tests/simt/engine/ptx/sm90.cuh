// The functions of csrc/kernels/ptx/sm90.cuh on the CPU; that file says what each does.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <ptx/common.cuh>
#include <ptx/wgmma.cuh>

namespace amp_ext::ptx {

constexpr bool kSm90a = true;

struct alignas(8) Mbarrier {
  uint64_t opaque;
};

void mbarrier_init(Mbarrier& barrier, int arrivals);
void fence_mbarrier_init();
void mbarrier_arrive(Mbarrier& barrier);
void mbarrier_arrive_expect_tx(Mbarrier& barrier, int bytes);
void mbarrier_arrive_cluster(Mbarrier& barrier, int rank);
bool mbarrier_try_wait(Mbarrier& barrier, int parity);
void mbarrier_wait(Mbarrier& barrier, int parity);

int cluster_rank();
void cluster_sync();

void fence_proxy_async();
void tma_prefetch(const CUtensorMap& map);
void tma_load(void* to, const CUtensorMap& map, Mbarrier& full, int x, int y, int z);
void tma_load_multicast(void* to, const CUtensorMap& map, Mbarrier& full, int x, int y, int z,
                        uint16_t blocks);
void tma_store(const CUtensorMap& map, const void* from, int x, int y, int z);
void tma_reduce_add(const CUtensorMap& map, const void* from, int x, int y, int z);
void bulk_commit();

template <int kPending>
void bulk_wait_read() {
  simt::bulk_wait_read(kPending);
}

template <int kRegisters>
void setmaxnreg_dec() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
  simt::setmaxnreg(kRegisters, false);
}

template <int kRegisters>
void setmaxnreg_inc() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
  simt::setmaxnreg(kRegisters, true);
}

bool warp_elect();

inline void stmatrix(void* row, const uint32_t (&from)[4]) {
  simt::move_matrices({true, false, 4}, row, const_cast<uint32_t*>(from));
}

}  // namespace amp_ext::ptx
