// Declares the ways to compute large matrix products.
#pragma once

#include "gemm/operand.h"

namespace amp_ext::cpu {

// Extents of cached parts are multiples of this, unless they end the matrix.
constexpr int64_t kRowGroup = 64;

// Extents of parts, measured. A part has at most kBlockExtent rows and columns. A greater k is cut.
constexpr int64_t kBlockExtent = 2048, kMostDepth = 1024;

// The fewest lines of a widened block for each thread, and the elements of more lines, which stay
// in the thread's cache until they are read.
constexpr int64_t kCachedExtent = 256, kCachedElements = 1 << 16;

// The most floats of operands widened as a whole, and of all shares' blocks and partial sums.
constexpr int64_t kMostWorkspace = 1 << 22;

inline int64_t cached_extent(int64_t extent, int64_t other, int64_t threads) {
  const int64_t lines = kCachedElements / std::max<int64_t>(other, 1) / kRowGroup * kRowGroup;
  return std::min({extent, kBlockExtent, threads * std::max(kCachedExtent, lines)});
}

// The layout of an operand with dense rows or columns. ld is 0 if neither are dense.
struct Layout {
  int64_t ld = 0;
  bool transposed = false;
};

Layout layout_of(const MatrixRef& x, int64_t rows, int64_t columns);

// A part of a result: c = (rows of a) @ (columns of b), or c += that, in fp32. c is row-major.
struct Part {
  int64_t matrix;  // index in the batches a and b
  Range rows;
  Range columns;
  float* c;
  int64_t ldc;
  bool adds;
};

// Computes one product in parts of bounded rows and columns.
class Multiplier {
 public:
  virtual ~Multiplier() = default;

  // Returns the floats that multiply() needs, the same workspace at each call.
  virtual int64_t workspace() const = 0;
  virtual void multiply(const Part& part, float* workspace, const Host& host) = 0;
};

// Widens blocks to fp32 for the library's GEMM, `depth` of k at a time. If `share` is less than k,
// one thread adds up each share of k, and waits for no other. Else all threads work on each block.
class Widening final : public Multiplier {
 public:
  Widening(const GemmArgs& g, int64_t rows, int64_t columns, int64_t depth, int64_t share);

  int64_t workspace() const override;
  void multiply(const Part& part, float* workspace, const Host&) override;

 private:
  int64_t shares() const { return g_.k > share_ ? (g_.k + share_ - 1) / share_ : 1; }
  int64_t block_floats() const { return (rows_ + columns_) * depth_; }
  void multiply_depths(const Part&, Range depths, Widened& a, Widened& b, float* workspace,
                       const Host&) const;

  const GemmArgs& g_;
  int64_t rows_, columns_, depth_, share_;
  Widened a_, b_;
};

// Passes 16-bit operands to the library's GEMM in place.
class Direct final : public Multiplier {
 public:
  static bool can(const GemmArgs& g, const Host& host);

  explicit Direct(const GemmArgs& g) : g_(g) {}

  int64_t workspace() const override { return 0; }
  void multiply(const Part&, float* workspace, const Host&) override;

 private:
  const GemmArgs& g_;
};

// Packs BF16 operands and multiplies them in blocks.
class Blocks final : public Multiplier {
 public:
  static bool can(const GemmArgs& g, const Host& host);

  Blocks(const GemmArgs& g, int64_t rows, int64_t columns, int64_t threads);

  int64_t workspace() const override;
  void multiply(const Part&, float* workspace, const Host&) override;

 private:
  int64_t task_floats() const;
  void multiply_task(const Part&, float* workspace, const Host&) const;

  const GemmArgs& g_;
  int64_t rows_, columns_, steps_, tasks_;
};

// Reads b once and widens it on the way, for has_few_rows().
class FewRows final : public Multiplier {
 public:
  explicit FewRows(const GemmArgs& g) : g_(g) {}

  int64_t workspace() const override { return g_.m * g_.k; }
  void multiply(const Part&, float* workspace, const Host&) override;

 private:
  // Computes sums[r * ld + j] += a[r] . column j.
  void add_columns(const Part&, Range columns, const float* a, float* sums, int64_t ld) const;

  const GemmArgs& g_;
};

}  // namespace amp_ext::cpu
