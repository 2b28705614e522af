// Defines the span kernels, compiled once per instruction set with AMP_EXT_ISA = baseline, avx2 or
// avx512. The compiler vectorises plain loops. All symbols have internal linkage, and no standard
// library template is used: the linker could merge an AVX-512 copy into code for a machine without
// it.
#include "isa/span.h"

#include "isa/half.h"

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace amp_ext::cpu {
namespace {

// ---- conversions ----

struct F16 {
  static constexpr uint16_t kInfinity = 0x7c00;

  // Rounds to nearest even. Adding 0.5 to a magnitude below 2^-14 leaves its fp16 subnormal in the
  // low bits.
  static uint16_t narrow(float value) {
    const uint32_t bits = bit_cast<uint32_t>(value);
    const uint32_t magnitude = bits & 0x7fffffff;
    const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
    const uint32_t normal = (magnitude - ((127 - 15) << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    const uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : kInfinity;
    const uint32_t finite = magnitude < 0x38800000 ? subnormal : normal;
    return static_cast<uint16_t>((bits >> 16 & 0x8000) |
                                 (magnitude >= 0x47800000 ? special : finite));
  }

#ifdef __F16C__
  static void widen(const uint16_t* from, float* to, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
      _mm256_storeu_ps(
          to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
    }
    for (; i < n; ++i) to[i] = widen_f16(from[i]);
  }
  static void narrow(const float* from, uint16_t* to, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
      const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), half);
    }
    for (; i < n; ++i) to[i] = narrow(from[i]);
  }
#else
  static void widen(const uint16_t* from, float* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = widen_f16(from[i]);
  }
  static void narrow(const float* from, uint16_t* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = narrow(from[i]);
  }
#endif
};

struct BF16 {
  static constexpr uint16_t kInfinity = 0x7f80;

  static void widen(const uint16_t* from, float* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = bit_cast<float>(static_cast<uint32_t>(from[i]) << 16);
  }
  static void narrow(const float* from, uint16_t* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t bits = bit_cast<uint32_t>(from[i]);
      const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
      to[i] = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
    }
  }
};

// ---- spans of a type that is computed in itself ----

template <class Real>
struct Bits;
template <>
struct Bits<float> {
  using Type = uint32_t;
  static constexpr Type kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;
};
template <>
struct Bits<double> {
  using Type = uint64_t;
  static constexpr Type kMagnitude = 0x7fffffffffffffff, kInfinity = 0x7ff0000000000000;
};

// Keeps the largest magnitude as an integer: inf and every NaN compare above all finite values.

template <class Word, Word kMagnitude, Word kInfinity>
bool any_non_finite(const void* data, int64_t n) {
  const auto* words = static_cast<const Word*>(data);
  Word peak = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Word magnitude = words[i] & kMagnitude;
    peak = magnitude > peak ? magnitude : peak;
  }
  return peak >= kInfinity;
}

template <class Real>
bool unscale(void* data, int64_t n, float inv_scale, float coefficient) {
  using Word = typename Bits<Real>::Type;
  auto* values = static_cast<Real*>(data);
  Word peak = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Real product = values[i] * inv_scale * coefficient;
    const Word magnitude = bit_cast<Word>(product) & Bits<Real>::kMagnitude;
    values[i] = product;
    peak = magnitude > peak ? magnitude : peak;
  }
  return peak >= Bits<Real>::kInfinity;
}

template <class Real>
bool sum_squares(const void* data, int64_t n, float inv_scale, double* sum) {
  using Word = typename Bits<Real>::Type;
  const auto* values = static_cast<const Real*>(data);
  Word peak = 0;
  double squares = 0;
#pragma omp simd reduction(+ : squares) reduction(max : peak)
  for (int64_t i = 0; i < n; ++i) {
    const Real product = values[i] * inv_scale;
    const Word magnitude = bit_cast<Word>(product) & Bits<Real>::kMagnitude;
    peak = magnitude > peak ? magnitude : peak;
    squares += static_cast<double>(product) * static_cast<double>(product);
  }
  *sum += squares;
  return peak >= Bits<Real>::kInfinity;
}

// ---- spans of a 16-bit type, widened to fp32 a tile at a time ----

constexpr int kTile = 1024;

template <class Half>
bool unscale_half(void* data, int64_t n, float inv_scale, float coefficient) {
  auto* values = static_cast<uint16_t*>(data);
  bool found = false;
  float tile[kTile];
  for (int64_t at = 0; at < n; at += kTile) {
    const int count = static_cast<int>(n - at < kTile ? n - at : kTile);
    Half::widen(values + at, tile, count);
    for (int i = 0; i < count; ++i) tile[i] = tile[i] * inv_scale * coefficient;
    Half::narrow(tile, values + at, count);
    found |= any_non_finite<uint16_t, 0x7fff, Half::kInfinity>(values + at, count);
  }
  return found;
}

template <class Half>
bool sum_squares_half(const void* data, int64_t n, float inv_scale, double* sum) {
  const auto* values = static_cast<const uint16_t*>(data);
  bool found = false;
  float tile[kTile];
  for (int64_t at = 0; at < n; at += kTile) {
    const int count = static_cast<int>(n - at < kTile ? n - at : kTile);
    Half::widen(values + at, tile, count);
    found |= sum_squares<float>(tile, count, inv_scale, sum);
  }
  return found;
}

// ---- conversions of whole spans ----

template <class Real>
void widen(const void* from, int64_t n, float* to) {
  const auto* values = static_cast<const Real*>(from);
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<float>(values[i]);
}

template <class Real>
void narrow(const float* from, int64_t n, void* to) {
  auto* values = static_cast<Real*>(to);
  for (int64_t i = 0; i < n; ++i) values[i] = from[i];
}

template <class Half>
void widen_half(const void* from, int64_t n, float* to) {
  Half::widen(static_cast<const uint16_t*>(from), to, n);
}

template <class Half>
void narrow_half(const float* from, int64_t n, void* to) {
  Half::narrow(from, static_cast<uint16_t*>(to), n);
}

}  // namespace

namespace AMP_EXT_ISA {

extern const SpanKernels kernels;
const SpanKernels kernels = {
    {unscale<float>, unscale_half<F16>, unscale_half<BF16>, unscale<double>},
    {any_non_finite<uint32_t, Bits<float>::kMagnitude, Bits<float>::kInfinity>,
     any_non_finite<uint16_t, 0x7fff, F16::kInfinity>,
     any_non_finite<uint16_t, 0x7fff, BF16::kInfinity>,
     any_non_finite<uint64_t, Bits<double>::kMagnitude, Bits<double>::kInfinity>},
    {sum_squares<float>, sum_squares_half<F16>, sum_squares_half<BF16>, sum_squares<double>},
    {widen<float>, widen_half<F16>, widen_half<BF16>, widen<double>},
    {narrow<float>, narrow_half<F16>, narrow_half<BF16>, narrow<double>},
};

}  // namespace AMP_EXT_ISA
}  // namespace amp_ext::cpu
