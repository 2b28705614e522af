// Wraps the instructions that feed tensor cores from sm_80 on: asynchronous copies, matrix
// fragments and their products.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <ptx/common.cuh>
#include <type_traits>

namespace amp_ext::ptx {

// ---- copies from global to shared memory -------------------------------------------------------

// Starts to copy `bytes` of 16 bytes and fills the rest with zeros. Both addresses are 16-byte
// aligned, and `from` is not read if bytes = 0. The copy is complete after this thread waits for
// its group. Other threads see it after a barrier behind that wait.
__device__ __forceinline__ void cp_async16(void* to, const void* from, int bytes = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(shared_address(to)), "l"(__cvta_generic_to_global(from)), "r"(bytes)
               : "memory");
}

// Closes a group of the thread's copies since the last commit; it may be empty.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" : : : "memory");
}

// Waits until at most kPending of the thread's latest groups are incomplete.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" : : "n"(kPending) : "memory");
}

// ---- matrix fragments: all lanes take part -----------------------------------------------------

// Loads 8x8 matrices of 16-bit elements from shared memory. Lane 8 i + r passes the 16-byte aligned
// address of row r of matrix i. Lane l receives two neighbouring elements in to[i]: elements 2 (l %
// 4) and the next, of row l / 4, or of column l / 4 with kTranspose. Two matrices ignore the
// addresses of lanes 16 to 31.
template <bool kTranspose, int kMatrices>
__device__ __forceinline__ void ldmatrix(uint32_t (&to)[kMatrices], const void* row) {
  static_assert(kMatrices == 2 || kMatrices == 4);
  const uint32_t address = shared_address(row);
  if constexpr (kMatrices == 2 && kTranspose)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1])
                 : "r"(address)
                 : "memory");
  else if constexpr (kMatrices == 2)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1])
                 : "r"(address)
                 : "memory");
  else if constexpr (kTranspose)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

// Computes d += a b for a 16x16 tile of a and a 16x8 tile of b, with FP32 sums. T is __half or
// __nv_bfloat16. With g = lane / 4 and t = 2 (lane % 4), each register holds two elements:
//   a[i]  row g + 8 (i % 2), columns t + 8 (i / 2) and the next: ldmatrix of a's rows
//   b[i]  rows t + 8 i and the next, column g: ldmatrix of b's columns
//   d[i]  row g + 8 (i / 2), column t + i % 2
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, __half>)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else
    static_assert(sizeof(T) == 0, "__half or __nv_bfloat16");
}

}  // namespace amp_ext::ptx
