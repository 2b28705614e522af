// Computes matrix products of 16-bit operands with FP32 sums and one rounding. The library
// multiplies directly if the processor has AMX for the type, in packed blocks if it has other BF16
// instructions, else widened to FP32 block by block.
#include "backend.h"
#include "gemm/operand.h"
#include "gemm/plan.h"
#include "isa/rows.h"
#include "isa/span.h"

namespace amp_ext::cpu {
namespace {

// Values of GemmArgs::variant: multiplied by the library directly, or in packed blocks. 0 selects
// the way expected to be the fastest.
constexpr int64_t kDirect = 1, kBlocks = 2;

// A product of fewer multiplications takes less time here than torch's 16-bit one, measured: by AMX
// with few sums if torch's needs padded rows, by it or in packed blocks, and in FP32.
constexpr int64_t kSmallPadded = 1 << 24, kSmall16Bit = 1 << 22, kSmallProduct = 1 << 17;
constexpr int64_t kFewSums = 1 << 14;

// The multiplications of several small products that justify waking a thread.
constexpr int64_t kBatchGrain = 1 << 19;

// The most rows for which this code beats torch's FP16 instructions; 12 take 1.05 of their time.
constexpr int64_t kMostRowsBesideTorch = 8;

constexpr int64_t kLine = 1024;

// Lines of sums have a multiple of this length: oneDNN generates and keeps code for each length.
constexpr int64_t kLineUnit = 64;

bool is_sum(const GemmArgs& g) {
  return g.out.dtype == DType::f32 && (!g.c.data || adds_to_out(g)) && !g.bias.data &&
         static_cast<float>(g.alpha) == 1;
}

// Finishes sums in place and rounds them to rows of `out`.
void finish_rows(const GemmArgs& g, int64_t batch, Range rows, Range columns, float* sums,
                 int64_t ld) {
  const RowKernels& kernels = row_kernels();
  const auto narrow = span_kernels().narrow[static_cast<int>(g.out.dtype)];
  const bool combines = g.alpha != 1 || g.c.data || g.bias.data;
  for (int64_t i = 0; i < rows.size; ++i) {
    for (int64_t j = 0; j < columns.size; j += kLine) {
      const int64_t row = rows.begin + i, column = columns.begin + j;
      const int64_t count = std::min(kLine, columns.size - j);
      const auto place = [&](const MatrixRef& x) {
        return const_cast<char*>(address(x, batch, row, column));
      };
      float* const values = sums + i * ld + j;
      if (combines) {
        float c[kLine], bias[kLine];
        if (g.c.data) widen(place(g.c), g.c.dtype, g.c.column_stride, count, c);
        if (g.bias.data) widen(address(g.bias, column), g.bias.dtype, 1, count, bias);
        kernels.combine(values, count, static_cast<float>(g.alpha), static_cast<float>(g.beta),
                        g.c.data ? c : nullptr, g.bias.data ? bias : nullptr);
      }
      narrow(values, count, place(g.out));
    }
  }
}

Plan plan_of(const GemmArgs& g, const Host& host) {
  const bool is_free = g.variant == 0;
  if (is_free && has_few_rows(g, host)) return plan_few_rows(g, host);
  const bool prefers_direct = is_free ? has_tiles_of(g.a.dtype) : g.variant == kDirect;
  if (prefers_direct && can_multiply_directly(g, host)) return plan_direct(g, host);
  if ((is_free || g.variant == kBlocks) && can_multiply_in_blocks(g, host))
    return plan_blocks(g, host);
  return plan_widening(g, host);
}

void multiply(const GemmArgs& g, Range batches, const Host& host) {
  const auto [mb, nb, floats, multiply_part, stride_unit, most_stride] = plan_of(g, host);
  const int64_t stride = g.out.row_stride;
  const bool direct = is_sum(g) && stride % stride_unit == 0 && stride <= most_stride;
  const bool adds = direct && adds_to_out(g);
  const int64_t ld_sums = round_up(nb, kLineUnit), sum_count = direct ? 0 : mb * ld_sums;
  float* const sums = host.workspace(sum_count + floats);
  float* const workspace = sums + sum_count;

  for (int64_t batch = batches.begin; batch < batches.begin + batches.size; ++batch) {
    for (int64_t j = 0; j < g.n; j += nb) {
      const Range columns{j, std::min(nb, g.n - j)};
      for (int64_t i = 0; i < g.m; i += mb) {
        const Range rows{i, std::min(mb, g.m - i)};
        char* const out = const_cast<char*>(address(g.out, batch, i, j));
        float* const c = direct ? reinterpret_cast<float*>(out) : sums;
        const int64_t ldc = direct ? std::max(stride, columns.size) : ld_sums;
        if (g.terms * g.k == 0 && !adds) {
          for (int64_t r = 0; r < rows.size; ++r) std::fill_n(c + r * ldc, columns.size, 0.0f);
        }
        for (int64_t term = 0; term < (g.k ? g.terms : 0); ++term) {
          multiply_part({batch * g.terms + term, rows, columns, c, ldc, adds || term > 0},
                        workspace);
        }
        if (direct) continue;
        parallel(host, rows.size, grain(kConvertGrain, columns.size),
                 [&](int64_t begin, int64_t end) {
                   const Range part{i + begin, end - begin};
                   finish_rows(g, batch, part, columns, c + begin * ldc, ldc);
                 });
      }
    }
  }
}

}  // namespace

const char* CpuBackend::why_not(const GemmArgs& g, int) const {
  return g.a.dtype == DType::f64 || g.b.dtype == DType::f64 ? "FP64 operands" : nullptr;
}

const char* CpuBackend::why_slow(const GemmArgs& g, int) const {
  const bool by_tiles = has_tiles_of(g.a.dtype) && can_multiply_directly(g, host_) &&
                        g.batch * g.m * round_up(g.n, kLineUnit) <= kFewSums;
  const bool in_blocks = !has_tiles_of(g.a.dtype) && can_multiply_in_blocks(g, host_);
  int64_t small = by_tiles || in_blocks ? kSmall16Bit : kSmallProduct;
  if (by_tiles && g.k % product_step(g.a.dtype)) small = kSmallPadded;
  const bool is_large = g.batch * g.terms * g.m * g.n * g.k >= small;
  const bool has_few_enough = g.m <= kMostRowsBesideTorch && has_few_rows(g, host_);
  return is_large && has_products_of(g.a.dtype) && !has_few_enough
             ? "the processor's instructions for 16-bit products"
             : nullptr;
}

std::vector<int64_t> CpuBackend::gemm_variants(const GemmArgs& g, Services&) const {
  std::vector<int64_t> variants{0};
  if (can_multiply_directly(g, host_)) variants.push_back(kDirect);
  if (can_multiply_in_blocks(g, host_)) variants.push_back(kBlocks);
  return variants;
}

Status CpuBackend::gemm(const GemmArgs& g, Services&) const {
  if (g.batch * g.m * g.n == 0) return Status::ok;
  // Threads share large products one after another, and the batch of small ones.
  const int64_t each = g.terms * g.m * g.n * g.k;
  parallel(host_, g.batch, each < kSmallProduct ? grain(kBatchGrain, each) : g.batch,
           [&](int64_t begin, int64_t end) { multiply(g, {begin, end - begin}, host_); });
  return Status::ok;
}

}  // namespace amp_ext::cpu
