// Packs operands by transposing 16-byte squares in registers, with instructions of every x86-64
// processor. Packing takes a noticeable part of a product's time.
#include "gemm/pack.h"

#include <algorithm>
#include <cstring>

#ifdef AMP_EXT_X86
#include <emmintrin.h>
#endif

namespace amp_ext::cpu {
namespace {

constexpr int64_t kLineBytes = 64;  // a cache line

#ifdef AMP_EXT_X86
template <class T>
__m128i interleave_low(__m128i a, __m128i b) {
  return sizeof(T) == 2 ? _mm_unpacklo_epi16(a, b) : _mm_unpacklo_epi32(a, b);
}
template <class T>
__m128i interleave_high(__m128i a, __m128i b) {
  return sizeof(T) == 2 ? _mm_unpackhi_epi16(a, b) : _mm_unpackhi_epi32(a, b);
}

// Computes to[i * ld + j] = from[j * stride + i] for i, j < kSide. Each round interleaves the lines
// of the first half with the second half.
template <class T, int kSide>
void transpose_square(const uint16_t* from, int64_t stride, T* to, int64_t ld) {
  __m128i lines[kSide];
  for (int i = 0; i < kSide; ++i) {
    lines[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * stride));
  }
  for (int round = 1; round < kSide; round *= 2) {
    __m128i next[kSide];
    for (int i = 0; i < kSide / 2; ++i) {
      next[2 * i] = interleave_low<T>(lines[i], lines[i + kSide / 2]);
      next[2 * i + 1] = interleave_high<T>(lines[i], lines[i + kSide / 2]);
    }
    std::copy_n(next, kSide, lines);
  }
  for (int i = 0; i < kSide; ++i) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * ld), lines[i]);
  }
}
#endif

// Computes to[i * ld + j] = element i of line j. Lines are `stride` 16-bit elements apart.
template <class T>
void transpose(const uint16_t* from, int64_t stride, int64_t rows, int64_t columns, T* to,
               int64_t ld) {
  constexpr int64_t kSide = 16 / sizeof(T), kRows = kLineBytes / sizeof(T);
  constexpr int64_t kWords = sizeof(T) / sizeof(uint16_t);
  for (int64_t first = 0; first < rows; first += kRows) {
    const int64_t last = std::min(rows, first + kRows);
    for (int64_t j = 0; j < columns; j += kSide) {
      for (int64_t i = first; i < last; i += kSide) {
        const uint16_t* const source = from + j * stride + i * kWords;
        T* const target = to + i * ld + j;
#ifdef AMP_EXT_X86
        if (i + kSide <= last && j + kSide <= columns) {
          transpose_square<T, kSide>(source, stride, target, ld);
          continue;
        }
#endif
        for (int64_t y = 0; y < std::min(kSide, columns - j); ++y) {
          for (int64_t x = 0; x < std::min(kSide, last - i); ++x) {
            std::memcpy(target + x * ld + y, source + y * stride + x * kWords, sizeof(T));
          }
        }
      }
    }
  }
}

}  // namespace

void copy_rows(const Matrix16& from, uint16_t* to, int64_t ld) {
  if (from.row_stride == 1 && from.column_stride != 1)
    return transpose(from.data, from.column_stride, from.rows, from.columns, to, ld);
  for (int64_t i = 0; i < from.rows; ++i) {
    const uint16_t* const row = from.data + i * from.row_stride;
    if (from.column_stride == 1) {
      std::memcpy(to + i * ld, row, from.columns * sizeof(uint16_t));
    } else {
      for (int64_t j = 0; j < from.columns; ++j) to[i * ld + j] = row[j * from.column_stride];
    }
  }
}

void copy_pairs(const Matrix16& from, uint16_t* to, int64_t ld) {
  auto* const pairs = reinterpret_cast<uint32_t*>(to);
  int64_t i = 0;
  if (from.row_stride == 1 && from.column_stride != 1) {
    i = from.rows / 2 * 2;
    transpose(from.data, from.column_stride, i / 2, from.columns, pairs, ld);
  }
  for (; i < from.rows; i += 2) {
    const uint16_t* const even = from.data + i * from.row_stride;
    const uint16_t* const odd = even + from.row_stride;
    uint32_t* const line = pairs + i / 2 * ld;
    const int64_t step = from.column_stride;
    const bool has_odd = i + 1 < from.rows;
    if (!has_odd) {
      for (int64_t j = 0; j < from.columns; ++j) line[j] = even[j * step];
    } else if (step == 1) {
      for (int64_t j = 0; j < from.columns; ++j) {
        line[j] = even[j] | static_cast<uint32_t>(odd[j]) << 16;
      }
    } else {
      for (int64_t j = 0; j < from.columns; ++j) {
        line[j] = even[j * step] | static_cast<uint32_t>(odd[j * step]) << 16;
      }
    }
  }
}

}  // namespace amp_ext::cpu
