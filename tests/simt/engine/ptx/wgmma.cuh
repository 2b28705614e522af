// The functions of csrc/kernels/ptx/wgmma.cuh on the CPU; that file says what each does.
#pragma once

#include <cstdint>
#include <limits>
#include <ptx/sm80.cuh>

namespace amp_ext {

inline void forget(float& value) { value = std::numeric_limits<float>::quiet_NaN(); }

template <class T, int kSize>
void forget(T (&array)[kSize]) {
  for (T& element : array) forget(element);
}

}  // namespace amp_ext

namespace amp_ext::ptx {

enum class Major { k, mn };

template <int kRowBytes = 128>
uint64_t wgmma_descriptor(const void* tile, int leading, int stride) {
  constexpr uint64_t kSwizzle = (kRowBytes == 128 ? 1ull : 2ull) << 62;
  return kSwizzle | static_cast<uint64_t>(stride >> 4) << 32 |
         static_cast<uint64_t>(leading >> 4) << 16 | (shared_address(tile) & 0x3ffff) >> 4;
}

inline uint64_t wgmma_advance(uint64_t descriptor, int bytes) { return descriptor + (bytes >> 4); }

template <class... Arrays>
void wgmma_fence(Arrays&... accumulators) {
  simt::wgmma_fence();
}

void wgmma_commit();

template <int kPending, class... Arrays>
void wgmma_wait(Arrays&... accumulators) {
  simt::wgmma_wait(kPending);
}

template <class T, int kN, Major kA, Major kB>
void wgmma(float (&d)[kN / 2], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(kN == 128 || kN == 160 || kN == 192 || kN == 224 || kN == 256);
  simt::wgmma({simt::element<T>(), kN, kA == Major::mn, kB == Major::mn, a, b, accumulate}, d);
}

}  // namespace amp_ext::ptx
