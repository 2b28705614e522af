// Intrinsics, since no compiler finds these instructions by itself. They are of AVX512_BF16 alone:
// nothing here is called on another processor (dispatch.cpp).
#include "isa/bf16.h"

#ifdef AMP_EXT_X86

#include <immintrin.h>

#include <cstring>

#define AMP_EXT_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

namespace amp_ext::cpu {
namespace {

constexpr int kLanes = 16;
// (Without a mask, GCC 12 warns of what the intrinsics leave undefined.)
constexpr __mmask16 kAll = 0xffff;
constexpr int kVectors = kBf16Columns / kLanes;

AMP_EXT_BF16 inline __mmask16 first(int64_t count) {
  return static_cast<__mmask16>(count >= kLanes ? 0xffff : count <= 0 ? 0 : (1 << count) - 1);
}

// Rows or columns that lie side by side: two steps of k become pairs, 16 at a time.
template <int kWidth>
AMP_EXT_BF16 void interleave(const Bf16PanelArgs& x) {
  for (int64_t p = 0; p < x.k; p += 2) {
    const uint16_t* const even = x.from + p * x.k_stride;
    for (int i = 0; i < kWidth; i += kLanes) {
      const __mmask16 given = first(x.count - i);
      const __m512i low =
          _mm512_maskz_cvtepu16_epi32(kAll, _mm256_maskz_loadu_epi16(given, even + i));
      const __m256i odd = p + 1 < x.k ? _mm256_maskz_loadu_epi16(given, even + x.k_stride + i)
                                      : _mm256_setzero_si256();
      const __m512i pairs = _mm512_or_si512(
          low, _mm512_maskz_slli_epi32(kAll, _mm512_maskz_cvtepu16_epi32(kAll, odd), 16));
      _mm512_mask_storeu_epi32(x.to + p / 2 * kWidth + i, first(kWidth - i), pairs);
    }
  }
}

template <int kWidth>
void pack(const Bf16PanelArgs& x) {
  if (x.stride == 1) return interleave<kWidth>(x);
  std::memset(x.to, 0, bf16_pairs(x.k) * kWidth * sizeof(uint32_t));
  for (int64_t i = 0; i < x.count; ++i) {
    const uint16_t* const from = x.from + i * x.stride;
    for (int64_t p = 0; p < x.k; p += 2) {
      const uint32_t even = from[p * x.k_stride];
      const uint32_t odd = p + 1 < x.k ? from[(p + 1) * x.k_stride] : 0;
      x.to[p / 2 * kWidth + i] = even | odd << 16;
    }
  }
}

// The sums stay in registers: kRows * kVectors of the 32 there are.
template <int kRows>
AMP_EXT_BF16 void multiply_rows(const Bf16TileArgs& t) {
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) __builtin_prefetch(t.c + r * t.ldc + v * kLanes, 1);
  }
  __m512 sums[kRows][kVectors] = {};
  const uint32_t* a = t.a;
  const uint32_t* b = t.b;
  for (int64_t p = 0; p < t.pairs; ++p, a += kBf16Rows, b += kBf16Columns) {
    __m512bh factors[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      factors[v] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + v * kLanes));
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const auto pair = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(a[r])));
      for (int v = 0; v < kVectors; ++v)
        sums[r][v] = _mm512_dpbf16_ps(sums[r][v], pair, factors[v]);
    }
  }
  const __m512 alpha = _mm512_set1_ps(t.alpha);
  __mmask16 given[kVectors];
  for (int v = 0; v < kVectors; ++v) given[v] = first(t.columns - v * kLanes);
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      float* const c = t.c + r * t.ldc + v * kLanes;
      const __m512 before = t.adds ? _mm512_maskz_loadu_ps(given[v], c) : _mm512_setzero_ps();
      _mm512_mask_storeu_ps(c, given[v], _mm512_fmadd_ps(alpha, sums[r][v], before));
    }
  }
}

template <int kRows>
void multiply(const Bf16TileArgs& t) {
  if constexpr (kRows > 1) {
    if (t.rows < kRows) return multiply<kRows - 1>(t);
  }
  multiply_rows<kRows>(t);
}

}  // namespace

extern const Bf16Kernels avx512_bf16_kernels;
const Bf16Kernels avx512_bf16_kernels{pack<kBf16Rows>, pack<kBf16Columns>, multiply<kBf16Rows>};

}  // namespace amp_ext::cpu

#endif
