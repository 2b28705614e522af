// Wraps wgmma: products of tiles in shared memory by all 128 threads of a warpgroup.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <ptx/common.cuh>
#include <type_traits>

namespace amp_ext {

// Keeps the compiler from moving accesses to registers, or arrays of them, across this point.
__device__ __forceinline__ void pin(float& value) { asm volatile("" : "+f"(value) : : "memory"); }

template <class T, int kSize>
__device__ __forceinline__ void pin(T (&array)[kSize]) {
  for (T& element : array) pin(element);
}

// Invalidates values, so that the next wgmma receives none from code of a subset of the warps.
__device__ __forceinline__ void forget(float& value) { asm volatile("" : "=f"(value)); }

template <class T, int kSize>
__device__ __forceinline__ void forget(T (&array)[kSize]) {
  for (T& element : array) forget(element);
}

}  // namespace amp_ext

namespace amp_ext::ptx {

// The contiguous index of an operand in shared memory: k, or mn (m of a, n of b).
enum class Major { k, mn };

// Encodes an operand in shared memory with TMA's swizzle of 128 bytes. Atoms are 8 rows of 128
// bytes, each aligned to its size. Offsets are in bytes. `stride` separates groups of 8 rows, along
// m or n if k is contiguous, else along k. `leading` separates a row's contiguous parts if k is not
// contiguous, else it is 16, which the hardware assumes.
__device__ __forceinline__ uint64_t wgmma_descriptor(const void* tile, int leading, int stride) {
  constexpr uint64_t kSwizzle = 1ull << 62;
  return kSwizzle | static_cast<uint64_t>(stride >> 4) << 32 |
         static_cast<uint64_t>(leading >> 4) << 16 | (shared_address(tile) & 0x3ffff) >> 4;
}

// Advances a descriptor by `bytes`.
__device__ __forceinline__ uint64_t wgmma_advance(uint64_t descriptor, int bytes) {
  return descriptor + (bytes >> 4);
}

// Orders register accesses before the first wgmma, and before a wgmma after wgmma_wait. (The
// hardware needs it only after registers were touched.) `accumulators` are all arrays that the next
// wgmmas add to.
template <class... Arrays>
__device__ __forceinline__ void wgmma_fence(Arrays&... accumulators) {
  (pin(accumulators), ...);
  asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
}

// Closes a group of the wgmmas since the last commit.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
}

// Waits until at most kPending of the latest groups are incomplete. Shared memory read by earlier
// groups is then free, and `accumulators` without a pending group can be read.
template <int kPending, class... Arrays>
__device__ __forceinline__ void wgmma_wait(Arrays&... accumulators) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(kPending) : "memory");
  (pin(accumulators), ...);
}

// Lists the first n registers of an accumulator as instruction names and as operands.
#define AMP_EXT_NAMES_64                                                             \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"             \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31" \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define AMP_EXT_NAMES_96                                                             \
  AMP_EXT_NAMES_64                                                                   \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define AMP_EXT_NAMES_128                                                                        \
  AMP_EXT_NAMES_96                                                                               \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
  "%127"
#define AMP_EXT_OPERANDS_8(i)                                                                 \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define AMP_EXT_OPERANDS_16(i) AMP_EXT_OPERANDS_8(i), AMP_EXT_OPERANDS_8(i + 8)
#define AMP_EXT_OPERANDS_64 \
  AMP_EXT_OPERANDS_16(0), AMP_EXT_OPERANDS_16(16), AMP_EXT_OPERANDS_16(32), AMP_EXT_OPERANDS_16(48)
#define AMP_EXT_OPERANDS_96 AMP_EXT_OPERANDS_64, AMP_EXT_OPERANDS_16(64), AMP_EXT_OPERANDS_16(80)
#define AMP_EXT_OPERANDS_128 AMP_EXT_OPERANDS_96, AMP_EXT_OPERANDS_16(96), AMP_EXT_OPERANDS_16(112)

#define AMP_EXT_WGMMA(n, type, registers, a_, b_, accumulate_, major_a, major_b)                  \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " accumulate_                                    \
               ", 0;\n"                                                                           \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type                    \
               " {" AMP_EXT_NAMES_##registers "}, " a_ ", " b_ ", p, 1, 1, " major_a ", " major_b \
                                              ";\n}"                                              \
               : AMP_EXT_OPERANDS_##registers                                                     \
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)),                               \
                 "n"(static_cast<int>(kA == Major::mn)), "n"(static_cast<int>(kB == Major::mn)))
#define AMP_EXT_WGMMA_N(n, registers, a_, b_, accumulate_, major_a, major_b)   \
  if constexpr (kN == n && std::is_same_v<T, __half>)                          \
    AMP_EXT_WGMMA(n, "f16", registers, a_, b_, accumulate_, major_a, major_b); \
  if constexpr (kN == n && std::is_same_v<T, __nv_bfloat16>)                   \
  AMP_EXT_WGMMA(n, "bf16", registers, a_, b_, accumulate_, major_a, major_b)

// Starts d += a b, or d = a b without `accumulate`, for a 64x16 tile of a and a 16xkN tile of b
// with FP32 sums. T is __half or __nv_bfloat16, and all threads pass equal descriptors. d is not
// touched before a wgmma_wait. With warp w of the warpgroup, g = lane / 4 and t = 2 (lane % 4):
//   d[i]  row 16 w + g + 8 (i / 2 % 2), column 8 (i / 4) + t + i % 2
template <class T, int kN, Major kA, Major kB>
__device__ __forceinline__ void wgmma(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(kN == 128 || kN == 192 || kN == 256);
  static_assert(std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>);
  AMP_EXT_WGMMA_N(128, 64, "%64", "%65", "%66", "%67", "%68");
  AMP_EXT_WGMMA_N(192, 96, "%96", "%97", "%98", "%99", "%100");
  AMP_EXT_WGMMA_N(256, 128, "%128", "%129", "%130", "%131", "%132");
}

#undef AMP_EXT_WGMMA_N
#undef AMP_EXT_WGMMA
#undef AMP_EXT_NAMES_64
#undef AMP_EXT_NAMES_96
#undef AMP_EXT_NAMES_128
#undef AMP_EXT_OPERANDS_8
#undef AMP_EXT_OPERANDS_16
#undef AMP_EXT_OPERANDS_64
#undef AMP_EXT_OPERANDS_96
#undef AMP_EXT_OPERANDS_128

}  // namespace amp_ext::ptx
