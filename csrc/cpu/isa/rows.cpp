// Defines the row kernels, compiled once per instruction set under the rules of span.cpp. A
// multiply and an add may fuse here: the order of a product's sum is not promised.
#include "isa/rows.h"

#include <cstring>

#include "isa/half.h"

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace amp_ext::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

typedef float Vector __attribute__((vector_size(kVectorBytes)));
constexpr int kLanes = kVectorBytes / 4;

void combine(float* values, int64_t n, float alpha, float beta, const float* c, const float* bias) {
  if (alpha != 1) {
    for (int64_t i = 0; i < n; ++i) values[i] *= alpha;
  }
  if (c) {
    for (int64_t i = 0; i < n; ++i) values[i] += beta * c[i];
  }
  if (bias) {
    for (int64_t i = 0; i < n; ++i) values[i] += bias[i];
  }
}

// Calls body(i, count) for vectors from index i. The last vector may be partial.
template <class Body>
void for_each_vector(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, kLanes);
  if (i < n) body(i, static_cast<int>(n - i));
}

#if defined(__AVX512F__)
inline __mmask16 mask_of(int count) { return static_cast<__mmask16>((1u << count) - 1); }

inline Vector load(const float* from, int count) {
  return _mm512_maskz_loadu_ps(mask_of(count), from);
}

inline void store(Vector value, int count, float* to) {
  _mm512_mask_storeu_ps(to, mask_of(count), value);
}
#else
inline Vector load(const float* from, int count) {
  Vector result{};
  std::memcpy(&result, from, count * sizeof(float));
  return result;
}

inline void store(Vector value, int count, float* to) {
  std::memcpy(to, &value, count * sizeof(float));
}
#endif

// Widens 16-bit elements to fp32; elements beyond `count` are 0.
struct F16 {
  static Vector load(const uint16_t* from, int count) {
#if defined(__AVX512F__)
    const __mmask16 given = mask_of(count);
    return _mm512_maskz_cvtph_ps(given, _mm256_maskz_loadu_epi16(given, from));
#else
    uint16_t line[kLanes] = {};
    std::memcpy(line, from, count * sizeof(uint16_t));
#if defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(line)));
#else
    Vector result;
    for (int i = 0; i < kLanes; ++i) result[i] = widen_f16(line[i]);
    return result;
#endif
#endif
  }
};

struct BF16 {
  static Vector load(const uint16_t* from, int count) {
#if defined(__AVX512F__)
    const __m256i halves = _mm256_maskz_loadu_epi16(mask_of(count), from);
    return _mm512_castsi512_ps(
        _mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, halves), 16));
#else
    typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));
    typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
    Halves line{};
    std::memcpy(&line, from, count * sizeof(uint16_t));
    const Words words = __builtin_convertvector(line, Words) << 16;
    Vector result;
    std::memcpy(&result, &words, sizeof result);
    return result;
#endif
  }
};

float sum_of(Vector x) {
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += x[i];
  return sum;
}

// Calls body(Constant<size>, first) for groups of kMost, then for single elements.
template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

template <int kMost, class Body>
void for_each_group(int64_t count, Body body) {
  int64_t i = 0;
  for (; i + kMost <= count; i += kMost) body(Constant<kMost>{}, i);
  for (; i < count; ++i) body(Constant<1>{}, i);
}

// The limit is the number of registers.
constexpr int kLines = kLanes == 16 ? 8 : 4;
// The limits are measured.
constexpr int64_t kMostRows = kLanes == 16 ? 32 : kLanes == 8 ? 16 : 4;

// Keeps a sum for each row and line. The loops are unrolled and inlined, since sums indexed at run
// time would be kept in memory.
template <class Half, int kRowCount, int kLineCount>
void add_dots(const FewRowsArgs& x, int64_t row, int64_t line) {
  const float* const a = x.a + row * x.lda;
  const uint16_t* const b = x.b + line * x.ldb;
  Vector sums[kRowCount][kLineCount] = {};
  for_each_vector(x.n, [&](int64_t i, int count) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int l = 0; l < kLineCount; ++l) {
      const Vector factor = Half::load(b + l * x.ldb + i, count);
#pragma GCC unroll 2
      for (int r = 0; r < kRowCount; ++r) sums[r][l] += load(a + r * x.lda + i, count) * factor;
    }
  });
#pragma GCC unroll 2
  for (int r = 0; r < kRowCount; ++r) {
#pragma GCC unroll 8
    for (int l = 0; l < kLineCount; ++l)
      x.sums[(row + r) * x.sums_ld + line + l] += sum_of(sums[r][l]);
  }
}

template <class Half, int kRowCount, int kLineCount>
void add_multiples(const FewRowsArgs& x, int64_t row, int64_t line) {
  const float* const a = x.a + row * x.lda + line;
  const uint16_t* const b = x.b + line * x.ldb;
  float* const sums = x.sums + row * x.sums_ld;
  for_each_vector(x.n, [&](int64_t i, int count) {
    Vector factors[kLineCount];
    for (int l = 0; l < kLineCount; ++l) factors[l] = Half::load(b + l * x.ldb + i, count);
    for (int r = 0; r < kRowCount; ++r) {
      float* const to = sums + r * x.sums_ld + i;
      Vector sum = load(to, count);
      for (int l = 0; l < kLineCount; ++l) sum += a[r * x.lda + l] * factors[l];
      store(sum, count, to);
    }
  });
}

// Adds in an order that depends only on n. A line's place in a group varies with the number of
// threads.
template <class Half>
void add_dots(const FewRowsArgs& x) {
  for_each_group<kLines>(x.lines, [&](auto lines, int64_t line) {
    for_each_group<2>(x.rows, [&](auto rows, int64_t row) {
      add_dots<Half, rows.value, lines.value>(x, row, line);
    });
  });
}

template <class Half>
void add_multiples(const FewRowsArgs& x) {
  for_each_group<kLines>(x.lines, [&](auto lines, int64_t line) {
    for_each_group<2>(x.rows, [&](auto rows, int64_t row) {
      add_multiples<Half, rows.value, lines.value>(x, row, line);
    });
  });
}

}  // namespace

namespace AMP_EXT_ISA {

extern const RowKernels row_kernels;
const RowKernels row_kernels = {
    kMostRows,
    {nullptr, add_dots<F16>, add_dots<BF16>, nullptr},
    {nullptr, add_multiples<F16>, add_multiples<BF16>, nullptr},
    combine,
};

}  // namespace AMP_EXT_ISA
}  // namespace amp_ext::cpu
