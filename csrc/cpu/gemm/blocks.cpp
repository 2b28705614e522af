// Multiplies BF16 operands into FP32 by the processor's BF16 instructions, in tasks of many blocks.
// Each task packs the operands of its own part: reading them from another thread's cache may take
// longer than packing them again.
#include "gemm/plan.h"

#ifdef __x86_64__
#include <emmintrin.h>
#endif

namespace amp_ext::cpu {
namespace {

// The most rows and columns of a block of the result.
constexpr int64_t kBlock = 64;

// Packed operands have a multiple of this many steps, the last ones 0, and so has the stride of a
// result: in each thread the library generates and keeps code for each number of steps, extent of a
// block and stride.
constexpr int64_t kStepUnit = 16;

// The greatest row stride of a result: the library addresses a block of it by 32 bits.
constexpr int64_t kMostStride = INT32_MAX / (kBlock * sizeof(float)) / kStepUnit * kStepUnit;

// Elements between packed rows of a: rows a power of two apart would evict each other.
constexpr int64_t kPadding = 32;

// The extents of a task are multiples of kUnit, unless they end the result. Extents are halved
// until each thread has a task, and those above kDivisible until threads have equal shares.
constexpr int64_t kUnit = 16, kDivisible = 128;

// Multiplications that justify waking a thread.
constexpr int64_t kMultiplyGrain = 1 << 20;

// The distance of prefetches. The processor does not foresee lines that are far apart: prefetched,
// a product with k = 9216 takes 0.75 of the time.
constexpr int64_t kLinesAhead = 16;

int64_t pieces(int64_t extent, int64_t size) { return (extent + size - 1) / size; }

Range piece(Range whole, int64_t index, int64_t size) {
  return {whole.begin + index * size, std::min(size, whole.size - index * size)};
}

// Dense rows or columns of 16-bit elements, `ld` apart.
struct Lines {
  const uint16_t* data;
  int64_t ld;
  int64_t count;
  int64_t length;
  bool are_columns;

  const uint16_t* operator[](int64_t line) const { return data + line * ld; }
};

Lines lines_of(const MatrixRef& x, Layout layout, int64_t batch, Range rows, Range columns) {
  const char* const from = address(x, batch, rows.begin, columns.begin);
  const auto* const data = reinterpret_cast<const uint16_t*>(from);
  if (layout.transposed) return {data, layout.ld, columns.size, rows.size, true};
  return {data, layout.ld, rows.size, columns.size, false};
}

#ifdef __x86_64__
template <class T>
__m128i interleave_low(__m128i a, __m128i b) {
  return sizeof(T) == 2 ? _mm_unpacklo_epi16(a, b) : _mm_unpacklo_epi32(a, b);
}
template <class T>
__m128i interleave_high(__m128i a, __m128i b) {
  return sizeof(T) == 2 ? _mm_unpackhi_epi16(a, b) : _mm_unpackhi_epi32(a, b);
}

// Transposes kSide lines of kSide elements. Each round interleaves the halves of the lines.
template <class T, int kSide>
void transpose_square(const uint16_t* from, int64_t from_ld, T* to, int64_t ld) {
  __m128i lines[kSide], next[kSide];
  for (int i = 0; i < kSide; ++i) {
    lines[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * from_ld));
  }
  for (int round = 1; round < kSide; round *= 2) {
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

// Copies the transpose of lines of T: one 16-bit element, or two. The rest of a line is left out.
template <class T>
void transpose(const Lines& from, T* to, int64_t ld) {
  constexpr int64_t kSide = 16 / sizeof(T), kWords = sizeof(T) / sizeof(uint16_t);
  constexpr int64_t kCacheLine = 64 / sizeof(T);
  const int64_t length = from.length / kWords;
  for (int64_t first = 0; first < length; first += kCacheLine) {
    const int64_t last = std::min(length, first + kCacheLine);
    for (int64_t j = 0; j < from.count; j += kSide) {
      const int64_t count = std::min(kSide, from.count - j);
      for (int64_t y = j; y < j + count; ++y) {
        __builtin_prefetch(from[y + kLinesAhead] + first * kWords);
      }
      for (int64_t i = first; i < last; i += kSide) {
#ifdef __x86_64__
        if (i + kSide <= last && count == kSide) {
          transpose_square<T, kSide>(from[j] + i * kWords, from.ld, to + i * ld + j, ld);
          continue;
        }
#endif
        for (int64_t x = i; x < std::min(i + kSide, last); ++x) {
          for (int64_t y = j; y < j + count; ++y) {
            std::memcpy(to + x * ld + y, from[y] + x * kWords, sizeof(T));
          }
        }
      }
    }
  }
}

// Packs rows of a, `ld` apart, filled up to k elements.
void pack_a(const Lines& from, int64_t k, uint16_t* to, int64_t ld) {
  const int64_t rows = from.are_columns ? from.length : from.count;
  const int64_t steps = from.are_columns ? from.count : from.length;
  if (from.are_columns) transpose(from, to, ld);
  for (int64_t i = 0; i < rows; ++i, to += ld) {
    if (!from.are_columns) std::copy_n(from[i], steps, to);
    std::fill(to + steps, to + k, 0);
  }
}

// Packs pairs of rows of b, kBlock apart, filled up to k rows.
void pack_b(const Lines& from, int64_t k, uint32_t* to) {
  const int64_t columns = from.are_columns ? from.count : from.length;
  const int64_t steps = from.are_columns ? from.length : from.count;
  if (from.are_columns) {
    transpose(from, to, kBlock);
  } else {
    for (int64_t p = 0; p + 1 < steps; p += 2) {
      const uint16_t *const even = from[p], *const odd = from[p + 1];
      for (int64_t j = 0; j < columns; j += 32) {
        __builtin_prefetch(even + kLinesAhead * from.ld + j);
        __builtin_prefetch(odd + kLinesAhead * from.ld + j);
      }
      for (int64_t j = 0; j < columns; ++j) {
        to[p / 2 * kBlock + j] = even[j] | static_cast<uint32_t>(odd[j]) << 16;
      }
    }
  }
  uint32_t* const rest = to + steps / 2 * kBlock;
  std::fill(rest, to + k / 2 * kBlock, 0);
  if (steps % 2 == 0) return;
  for (int64_t j = 0; j < columns; ++j) {
    rest[j] = from.are_columns ? from[j][steps - 1] : from[steps - 1][j];
  }
}

// Multiplies a task's part; `steps` is the most steps of k at a time.
void multiply_task(const GemmArgs& g, const Part& part, int64_t steps, float* workspace,
                   const Host& host) {
  const Layout a = layout_of(g.a, g.m, g.k), b = layout_of(g.b, g.k, g.n);
  auto* const packed_b = reinterpret_cast<uint32_t*>(workspace);
  auto* const packed_a = reinterpret_cast<uint16_t*>(workspace + kBlock * steps / 2);
  for (int64_t p = 0; p < g.k; p += steps) {
    const Range depth{p, std::min(steps, g.k - p)};
    const int64_t k = round_up(depth.size, kStepUnit), lda = k + kPadding;
    for (int64_t j = 0; j < part.columns.size; j += kBlock) {
      const Range columns = piece(part.columns, j / kBlock, kBlock);
      pack_b(lines_of(g.b, b, part.matrix, depth, columns), k, packed_b);
      for (int64_t i = 0; i < part.rows.size; i += kBlock) {
        const Range rows = piece(part.rows, i / kBlock, kBlock);
        uint16_t* const packed_rows = packed_a + i * lda;
        if (j == 0) pack_a(lines_of(g.a, a, part.matrix, rows, depth), k, packed_rows, lda);
        host.block_gemm({packed_rows, packed_b, part.c + i * part.ldc + j, DType::bf16, rows.size,
                         columns.size, k, lda, kBlock, part.ldc, false, false, part.adds || p > 0});
      }
    }
  }
}

}  // namespace

bool can_multiply_in_blocks(const GemmArgs& g, const Host& host) {
  return g.a.dtype == DType::bf16 && g.b.dtype == DType::bf16 && has_products_of(DType::bf16) &&
         host.has_block_gemm() && layout_of(g.a, g.m, g.k).ld && layout_of(g.b, g.k, g.n).ld;
}

Plan plan_blocks(const GemmArgs& g, const Host& host) {
  const int64_t most_rows = std::min(g.m, kBlockExtent), most_columns = std::min(g.n, kBlockExtent);
  const int64_t threads = host.threads();
  // The extents of a task.
  int64_t m = most_rows, n = most_columns, tasks = 1;
  const auto is_uneven = [&] { return round_up(tasks, threads) > tasks + tasks / 8; };
  while (is_uneven() && std::max(m, n) > (tasks < threads ? kBlock : kDivisible)) {
    int64_t& longest = m > n ? m : n;
    longest = round_up((longest + 1) / 2, kUnit);
    tasks = pieces(most_rows, m) * pieces(most_columns, n);
  }
  const int64_t steps = round_up(std::min(g.k, kMostDepth), kStepUnit);
  const int64_t task_floats = (m * (steps + kPadding) + kBlock * steps) / 2;
  const auto multiply = [=, &g, &host](const Part& part, float* workspace) {
    const int64_t across = pieces(part.columns.size, n), down = pieces(part.rows.size, m);
    parallel(host, across * down, grain(kMultiplyGrain, m * n * g.k),
             [&](int64_t begin, int64_t end) {
               for (int64_t task = begin; task < end; ++task) {
                 const Range rows = piece(part.rows, task % down, m);
                 const Range columns = piece(part.columns, task / down, n);
                 float* const c = part.c + (rows.begin - part.rows.begin) * part.ldc +
                                  columns.begin - part.columns.begin;
                 multiply_task(g, {part.matrix, rows, columns, c, part.ldc, part.adds}, steps,
                               workspace + task * task_floats, host);
               }
             });
  };
  return {most_rows, most_columns, tasks * task_floats, multiply, kStepUnit, kMostStride};
}

}  // namespace amp_ext::cpu
