// Declares the CPU backend.
#pragma once

#include "amp_ext/backend.h"
#include "amp_ext/host.h"

namespace amp_ext::cpu {

// Returns whether the processor has instructions for products of a 16-bit type: AVX512_FP16,
// AVX512_BF16.
bool has_products_of(DType type);

// Returns whether the processor has AMX for a type. Without AMX, MKL's 16-bit products are slower
// than its FP32 ones: 0.7 times their speed on an AMD EPYC with AVX512_BF16.
bool has_tiles_of(DType type);

// Returns whether a product has so few rows that reading the 16-bit b dominates.
bool has_few_rows(const GemmArgs& g, const Host& host);

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(const Host& host) : host_(host) {}

  const char* name() const override { return "cpu"; }
  AMP_EXT_LIST_OPS(AMP_EXT_OVERRIDE)
  const char* why_not(const GemmArgs&, int capability) const override;
  Status gemm(const GemmArgs&, Services&) const override;
  const char* why_slow(const GemmArgs&, int capability) const override;
  std::vector<int64_t> gemm_variants(const GemmArgs&, Services&) const override;
  int64_t product_step(DType type) const override {
    return has_tiles_of(type) ? 32 : has_products_of(type) ? 1 + (type == DType::bf16) : 0;
  }

 private:
  Host host_;
};

}  // namespace amp_ext::cpu
