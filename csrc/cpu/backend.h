// Declares the CPU backend.
#pragma once

#include "amp_ext/backend.h"
#include "amp_ext/host.h"

namespace amp_ext::cpu {

// Returns whether a product has so few rows that reading the 16-bit b dominates.
bool has_few_rows(const GemmArgs& g, const Host& host);

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(const Host& host) : host_(host) {}

  const char* name() const override { return "cpu"; }
  AMP_EXT_LIST_OPS(AMP_EXT_OVERRIDE)
  const char* why_not(const GemmArgs&) const override;
  Status gemm(const GemmArgs&, Services&) const override;
  const char* why_slow(const GemmArgs&, Services&) const override;
  std::vector<int64_t> gemm_variants(const GemmArgs&, Services&) const override;
  bool multiplies(DType type) const override {
    return host_.block_layout(type) != BlockLayout::none;
  }

 private:
  Host host_;
};

}  // namespace amp_ext::cpu
