// Instructions that feed tensor cores from sm_80 on, one small function each: copies to shared
// memory, fragments of matrices and their products.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <ptx/common.cuh>
#include <type_traits>

namespace amp_ext::ptx {

// ---- copies from global to shared memory -------------------------------------------------------

// Starts to copy `bytes` of 16; the rest becomes zero. Both addresses are 16-byte aligned, and
// `from` is not read where bytes = 0. Done once this thread has waited for its group; the other
// threads see it after a barrier behind that.
__device__ __forceinline__ void cp_async16(void* to, const void* from, int bytes = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(shared_address(to)), "l"(__cvta_generic_to_global(from)), "r"(bytes)
               : "memory");
}

// Makes this thread's copies since the last commit one group, which may be empty.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" : : : "memory");
}

// Waits until at most kPending of this thread's groups, the last ones, are not done.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" : : "n"(kPending) : "memory");
}

// ---- matrix fragments: all lanes take part -----------------------------------------------------

// Loads 8x8 matrices of 16-bit elements from shared memory. Lane 8 i + r gives the address of row r
// of matrix i, 16-byte aligned; lane l receives in to[i] elements 2 (l % 4) and the next of row
// l / 4, or of column l / 4 with kTranspose. With two matrices the addresses of lanes 16 to 31 are
// not read from.
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

// d += a b for a 16x16 tile of a, a 16x8 tile of b and FP32 sums; T is __half or __nv_bfloat16.
// With g = lane / 4 and t = 2 (lane % 4), two elements a register:
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
