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
  static constexpr int kFraction = 10;  // the bits of the fraction

  // Rounds to nearest even. Adding 0.5 to a magnitude below 2^-14 leaves its fp16 subnormal in the
  // low bits.
  static uint16_t narrow(float value) {
    const uint32_t bits = bit_cast<uint32_t>(value);
    const uint32_t magnitude = bits & 0x7fffffff;
    const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
    const uint32_t normal = (magnitude - ((127 - 15) << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    const uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    const uint32_t finite = magnitude < 0x38800000 ? subnormal : normal;
    return static_cast<uint16_t>((bits >> 16 & 0x8000) |
                                 (magnitude >= 0x47800000 ? special : finite));
  }

  static void widen(const void* from, int64_t n, float* to) {
    const auto* halves = static_cast<const uint16_t*>(from);
    int64_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= n; i += 8) {
      const auto* eight = reinterpret_cast<const __m128i*>(halves + i);
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(eight)));
    }
#endif
    for (; i < n; ++i) to[i] = widen_f16(halves[i]);
  }
  static void narrow(const float* from, int64_t n, void* to) {
    auto* halves = static_cast<uint16_t*>(to);
    int64_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= n; i += 8) {
      const __m128i eight = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(halves + i), eight);
    }
#endif
    for (; i < n; ++i) halves[i] = narrow(from[i]);
  }
};

struct BF16 {
  static constexpr int kFraction = 7;

  static void widen(const void* from, int64_t n, float* to) {
    const auto* halves = static_cast<const uint16_t*>(from);
    for (int64_t i = 0; i < n; ++i) to[i] = bit_cast<float>(static_cast<uint32_t>(halves[i]) << 16);
  }
  static void narrow(const float* from, int64_t n, void* to) {
    auto* halves = static_cast<uint16_t*>(to);
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t bits = bit_cast<uint32_t>(from[i]);
      const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
      halves[i] = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
    }
  }
};

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

// ---- spans of a type that is computed in itself ----

// Floating-point numbers as integers: inf and every NaN compare above all finite magnitudes.
template <class Word>
constexpr Word kMagnitude = static_cast<Word>(-1) / 2;
template <class Word, int kFraction>
constexpr Word kInfinity = kMagnitude<Word> >> kFraction << kFraction;

template <class Word, int kFraction>
bool any_non_finite(const void* data, int64_t n) {
  const auto* words = static_cast<const Word*>(data);
  Word peak = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Word magnitude = words[i] & kMagnitude<Word>;
    peak = magnitude > peak ? magnitude : peak;
  }
  return peak >= kInfinity<Word, kFraction>;
}

template <class Real, class Word, int kFraction>
bool unscale(void* data, int64_t n, float inv_scale, float coefficient) {
  auto* values = static_cast<Real*>(data);
  Word peak = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Real product = values[i] * inv_scale * coefficient;
    const Word magnitude = bit_cast<Word>(product) & kMagnitude<Word>;
    values[i] = product;
    peak = magnitude > peak ? magnitude : peak;
  }
  return peak >= kInfinity<Word, kFraction>;
}

template <class Real>
double sum_squares(const void* data, int64_t n, float inv_scale) {
  const auto* values = static_cast<const Real*>(data);
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) {
    const Real product = values[i] * inv_scale;
    sum += static_cast<double>(product) * static_cast<double>(product);
  }
  return sum;
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
    Half::widen(values + at, count, tile);
    for (int i = 0; i < count; ++i) tile[i] = tile[i] * inv_scale * coefficient;
    Half::narrow(tile, count, values + at);
    found |= any_non_finite<uint16_t, Half::kFraction>(values + at, count);
  }
  return found;
}

template <class Half>
double sum_squares_half(const void* data, int64_t n, float inv_scale) {
  const auto* values = static_cast<const uint16_t*>(data);
  double sum = 0;
  float tile[kTile];
  for (int64_t at = 0; at < n; at += kTile) {
    const int count = static_cast<int>(n - at < kTile ? n - at : kTile);
    Half::widen(values + at, count, tile);
    sum += sum_squares<float>(tile, count, inv_scale);
  }
  return sum;
}

}  // namespace

namespace AMP_EXT_ISA {

extern const SpanKernels kernels;
const SpanKernels kernels = {
    {unscale<float, uint32_t, 23>, unscale_half<F16>, unscale_half<BF16>,
     unscale<double, uint64_t, 52>},
    {any_non_finite<uint32_t, 23>, any_non_finite<uint16_t, 10>, any_non_finite<uint16_t, 7>,
     any_non_finite<uint64_t, 52>},
    {sum_squares<float>, sum_squares_half<F16>, sum_squares_half<BF16>, sum_squares<double>},
    {widen<float>, F16::widen, BF16::widen, widen<double>},
    {narrow<float>, F16::narrow, BF16::narrow, narrow<double>},
};

}  // namespace AMP_EXT_ISA
}  // namespace amp_ext::cpu
