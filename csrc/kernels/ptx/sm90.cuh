// Hopper's own instructions, one small function each. A kernel that uses them has its body in
// `if constexpr (ptx::kSm90a)`, and is thus empty when it is compiled for another architecture.
//
// Proxies: TMA and wgmma access shared memory apart from the threads' own loads and stores. What a
// thread wrote is seen by them after that thread's fence_proxy_async and a barrier.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <ptx/common.cuh>
#include <ptx/wgmma.cuh>

namespace amp_ext::ptx {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool kSm90a = true;
#else
constexpr bool kSm90a = false;
#endif

// ---- mbarriers ---------------------------------------------------------------------------------

// A barrier in shared memory with phases, which complete by turns of even and odd: phase 0 is even.
// A phase completes when the expected number of arrivals has come and no expected bytes are
// outstanding.
struct alignas(8) Mbarrier {
  uint64_t opaque;
};

// Makes it a barrier of `arrivals` a phase. By one thread; fence_mbarrier_init and a barrier of the
// block or the cluster come before any other use.
__device__ __forceinline__ void mbarrier_init(Mbarrier& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
               :
               : "r"(shared_address(&barrier)), "r"(arrivals)
               : "memory");
}

// Orders this thread's mbarrier_init before TMA and, with cluster_sync, before the other blocks.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}

// Arrives once, after all that this thread did before.
__device__ __forceinline__ void mbarrier_arrive(Mbarrier& barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];"
               :
               : "r"(shared_address(&barrier))
               : "memory");
}

// As mbarrier_arrive, and the phase also waits for `bytes` more to be written by TMA.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(Mbarrier& barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(shared_address(&barrier)), "r"(bytes)
               : "memory");
}

// Arrives at the same place in the shared memory of block `rank` of the cluster, which must not
// have exited. It says only that this thread has read: what it wrote is not ordered for that block.
__device__ __forceinline__ void mbarrier_arrive_cluster(Mbarrier& barrier, int rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}"
      :
      : "r"(shared_address(&barrier)), "r"(rank)
      : "memory");
}

// True if the phase of this parity has completed: then what TMA wrote for it, and all that came
// before the arrivals of this block's threads, is ordered before what this thread does next. May be
// false without need.
__device__ __forceinline__ bool mbarrier_try_wait(Mbarrier& barrier, int parity) {
  uint32_t completed;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(completed)
      : "r"(shared_address(&barrier)), "r"(parity)
      : "memory");
  return completed;
}

// Waits until the phase of this parity has completed; a barrier that has never completed one counts
// as if an odd phase had.
__device__ __forceinline__ void mbarrier_wait(Mbarrier& barrier, int parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

// ---- clusters ----------------------------------------------------------------------------------

// The block's number in its cluster.
__device__ __forceinline__ int cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

// Waits for all threads of the cluster; orders their memory accesses within it.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;"
               :
               :
               : "memory");
}

// ---- TMA: copies of boxes of three-dimensional tensors, each begun by one thread ----------------

// The proxy fence for shared memory of the block, for what this thread wrote before.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

// Fetches a tensor map ahead of its first use.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" : : "l"(&map) : "memory");
}

// Starts to load the box at element (x, y, z), x the contiguous one, to shared memory. What is
// outside of the tensor becomes zero and counts: `full` is always told of a whole box of bytes. The
// destination is aligned to 128 bytes, or to 1024 where the map swizzles 128.
__device__ __forceinline__ void tma_load(void* to, const CUtensorMap& map, Mbarrier& full, int x,
                                         int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];"
      :
      : "r"(shared_address(to)), "l"(&map), "r"(shared_address(&full)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// As tma_load, to the same place and barrier in every block of the cluster whose bit is in
// `blocks`.
__device__ __forceinline__ void tma_load_multicast(void* to, const CUtensorMap& map, Mbarrier& full,
                                                   int x, int y, int z, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;"
      :
      : "r"(shared_address(to)), "l"(&map), "r"(shared_address(&full)), "r"(x), "r"(y), "r"(z),
        "h"(blocks)
      : "memory");
}

// Starts to store a box from shared memory; what is outside of the tensor is dropped. The box
// belongs to this thread's next bulk_commit.
__device__ __forceinline__ void tma_store(const CUtensorMap& map, const void* from, int x, int y,
                                          int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];"
      :
      : "l"(&map), "r"(shared_address(from)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// As tma_store, but adds to the tensor, each element by an atomic operation.
__device__ __forceinline__ void tma_reduce_add(const CUtensorMap& map, const void* from, int x,
                                               int y, int z) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group "
      "[%0, {%2, %3, %4}], [%1];"
      :
      : "l"(&map), "r"(shared_address(from)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// Makes this thread's stores since the last commit one group.
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" : : : "memory");
}

// Waits until at most kPending of this thread's groups, the last ones, have still to read shared
// memory. Others may overwrite it after a barrier behind this. A thread that stored waits for all
// of its groups, at least so, before it exits.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(kPending) : "memory");
}

// ---- registers: all threads of a warpgroup take part --------------------------------------------

// Gives registers of each thread of the warpgroup back to the SM, or waits for it to have as many;
// kRegisters is a multiple of 8 from 24 to 256.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(kRegisters));
}

// ---- other warp instructions: all lanes take part
// ----------------------------------------------------------

// True in one lane, always the same, of a warp all of whose lanes take part.
__device__ __forceinline__ bool warp_elect() {
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(elected));
  return elected;
}

// Stores four 8x8 matrices of 16-bit elements to shared memory, the inverse of ldmatrix without
// kTranspose: lane 8 i + r gives the address of row r of matrix i, 16-byte aligned. All lanes take
// part.
__device__ __forceinline__ void stmatrix(void* row, const uint32_t (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :
               : "r"(shared_address(row)), "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}

}  // namespace amp_ext::ptx
