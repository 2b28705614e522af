// Wraps Hopper's instructions. A kernel that uses them has its body in `if constexpr
// (ptx::kSm90a)`, and is empty when compiled for another architecture.
//
// Proxies: TMA and wgmma access shared memory through another proxy than loads and stores. They see
// a thread's writes after its fence_proxy_async and a barrier.
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

// A barrier in shared memory with alternating phases: phase 0 is even. A phase completes when all
// expected arrivals have come and no expected bytes are outstanding.
struct alignas(8) Mbarrier {
  uint64_t opaque;
};

// Initialises a barrier of `arrivals` per phase, by one thread. fence_mbarrier_init and a barrier
// of the block precede any other use.
__device__ __forceinline__ void mbarrier_init(Mbarrier& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
               :
               : "r"(shared_address(&barrier)), "r"(arrivals)
               : "memory");
}

// Orders the thread's mbarrier_init before TMA.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}

// Arrives once, with release order for the thread's earlier accesses.
__device__ __forceinline__ void mbarrier_arrive(Mbarrier& barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];"
               :
               : "r"(shared_address(&barrier))
               : "memory");
}

// Arrives like mbarrier_arrive, and adds `bytes` that TMA must write before the phase completes.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(Mbarrier& barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(shared_address(&barrier)), "r"(bytes)
               : "memory");
}

// Returns whether the phase of this parity has completed; false results may be spurious. True
// orders TMA's writes for the phase, and accesses before the block's arrivals, before the caller's
// next accesses.
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

// Waits until the phase of this parity has completed. A new barrier counts as if an odd phase had
// completed.
__device__ __forceinline__ void mbarrier_wait(Mbarrier& barrier, int parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

// ---- TMA: copies of boxes of three-dimensional tensors, each begun by one thread ----------------

// Orders the thread's earlier writes to the block's shared memory before accesses by TMA and wgmma.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

// Prefetches a tensor map.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" : : "l"(&map) : "memory");
}

// Starts to load the box at element (x, y, z), x contiguous, to shared memory. Elements outside the
// tensor become zero, and `full` always counts the bytes of a whole box. The destination is aligned
// to 128 bytes, or to 1024 if the map swizzles 128 bytes.
__device__ __forceinline__ void tma_load(void* to, const CUtensorMap& map, Mbarrier& full, int x,
                                         int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];"
      :
      : "r"(shared_address(to)), "l"(&map), "r"(shared_address(&full)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// Starts to store a box from shared memory, without the elements outside the tensor. The box joins
// the thread's next bulk_commit.
__device__ __forceinline__ void tma_store(const CUtensorMap& map, const void* from, int x, int y,
                                          int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];"
      :
      : "l"(&map), "r"(shared_address(from)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// Starts to add a box to the tensor, each element by an atomic operation.
__device__ __forceinline__ void tma_reduce_add(const CUtensorMap& map, const void* from, int x,
                                               int y, int z) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group "
      "[%0, {%2, %3, %4}], [%1];"
      :
      : "l"(&map), "r"(shared_address(from)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// Closes a group of the thread's stores since the last commit.
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" : : : "memory");
}

// Waits until at most kPending of the thread's latest groups still read shared memory. After a
// further barrier other threads may overwrite it. A storing thread waits for all its groups in this
// way before it exits.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(kPending) : "memory");
}

// ---- registers: all threads of a warpgroup take part --------------------------------------------

// Releases registers of each thread to the SM, or waits to acquire them; kRegisters is a multiple
// of 8 from 24 to 256.
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
// ------------------------------------------------

// Returns true in one lane of the warp, always the same lane.
__device__ __forceinline__ bool warp_elect() {
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(elected));
  return elected;
}

// Stores four 8x8 matrices of 16-bit elements to shared memory, the inverse of ldmatrix without
// kTranspose. Lane 8 i + r passes the 16-byte aligned address of row r of matrix i. All lanes take
// part.
__device__ __forceinline__ void stmatrix(void* row, const uint32_t (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :
               : "r"(shared_address(row)), "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}

}  // namespace amp_ext::ptx
