// Ways to compute large matrix products.
#pragma once

#include "gemm/operand.h"

namespace amp_ext::cpu {

// Elements of a widened block, which is to be cached still when it is read, unless one has to be
// larger (16 MiB at most) to have this many rows or columns, for widening to be a small part of the
// work.
constexpr int64_t kBlockElements = 1 << 20;
constexpr int64_t kBlockExtent = 2048;

// Elements of operands that are widened whole, at most.
constexpr int64_t kMostWorkspace = 1 << 22;

inline int64_t block_extent(int64_t extent, int64_t other) {
  return std::min(extent, std::max(kBlockExtent, kBlockElements / std::max<int64_t>(other, 1)));
}

// Part of a result: c = (rows of a) @ (columns of b), or added to c, in fp32. c is row-major.
struct Part {
  int64_t matrix;  // of the batches a and b
  Range rows;
  Range columns;
  float* c;
  int64_t ldc;
  bool adds;
};

// For one product, whose parts have at most so many rows and columns.
class Multiplier {
 public:
  virtual ~Multiplier() = default;

  // How many floats multiply() needs, the same ones at each call.
  virtual int64_t workspace() const = 0;
  virtual void multiply(const Part& part, float* workspace, const Host& host) = 0;
};

// Widens blocks and has the library multiply them.
class Widening final : public Multiplier {
 public:
  Widening(const GemmArgs& g, int64_t rows, int64_t columns);

  int64_t workspace() const override { return (rows_ + columns_) * depth_; }
  void multiply(const Part&, float* workspace, const Host&) override;

 private:
  int64_t k_, rows_, columns_, depth_;
  Widened a_, b_;
};

// Has the library multiply 16-bit operands as they lie.
class Direct final : public Multiplier {
 public:
  static bool can(const GemmArgs& g, const Host& host);

  explicit Direct(const GemmArgs& g) : g_(g) {}

  int64_t workspace() const override { return 0; }
  void multiply(const Part&, float* workspace, const Host&) override;

 private:
  const GemmArgs& g_;
};

// Where has_few_rows(): the other operand is read once and widened on the way.
class FewRows final : public Multiplier {
 public:
  explicit FewRows(const GemmArgs& g) : g_(g) {}

  int64_t workspace() const override { return g_.m * g_.k; }
  void multiply(const Part&, float* workspace, const Host&) override;

 private:
  // sums[r * ld + j] += a[r] . column j of these.
  void add_columns(const Part&, Range columns, const float* a, float* sums, int64_t ld) const;

  const GemmArgs& g_;
};

}  // namespace amp_ext::cpu
