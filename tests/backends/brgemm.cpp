// A stand-in for oneDNN's brgemm on a processor with instructions for BF16, which take b in pairs
// of rows, and for FP16, which take rows. LD_PRELOAD puts it in the place of torch's own.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace c10 {
struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};
}  // namespace c10

namespace {

float widened(c10::BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

float widened(c10::Half x) {
  _Float16 value;
  std::memcpy(&value, &x, sizeof value);
  return static_cast<float>(value);
}

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "brgemm: expected %s\n", what);
  std::abort();
}

template <class T>
void multiply(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool adds,
              const T* a, const T* b, float* c, bool in_pairs) {
  require(m > 0 && n > 0 && k > 0, "a block");
  require(lda >= k && ldb >= n && ldc >= n, "rows that do not overlap");
  require(!in_pairs || k % 2 == 0, "whole pairs");
  for (int64_t i = 0; i < m; ++i) {
    float* const row = c + i * ldc;
    for (int64_t j = 0; !adds && j < n; ++j) row[j] = 0;
    for (int64_t p = 0; p < k; ++p) {
      const float factor = widened(a[i * lda + p]);
      const T* const line = in_pairs ? b + p / 2 * 2 * ldb + p % 2 : b + p * ldb;
      for (int64_t j = 0; j < n; ++j) row[j] += factor * widened(line[in_pairs ? 2 * j : j]);
    }
  }
}

}  // namespace

namespace at::native::cpublas {

__attribute__((visibility("default"))) void brgemm(int64_t m, int64_t n, int64_t k, int64_t lda,
                                                   int64_t ldb, int64_t ldc, const bool adds,
                                                   const c10::BFloat16* a, const c10::BFloat16* b,
                                                   float* c, bool) {
  multiply(m, n, k, lda, ldb, ldc, adds, a, b, c, true);
}

__attribute__((visibility("default"))) void brgemm(int64_t m, int64_t n, int64_t k, int64_t lda,
                                                   int64_t ldb, int64_t ldc, const bool adds,
                                                   const c10::Half* a, const c10::Half* b, float* c,
                                                   bool) {
  multiply(m, n, k, lda, ldb, ldc, adds, a, b, c, false);
}

__attribute__((visibility("default"))) void brgemm_release(bool) {}

}  // namespace at::native::cpublas
