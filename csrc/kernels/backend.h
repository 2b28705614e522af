// Declares the CUDA backend. Each op's method is defined beside its kernel. Methods allocate only
// through Services, never synchronise, and never use the default stream.
#pragma once

#include "amp_ext/backend.h"

namespace amp_ext {

struct GemmDevice;
struct GemmPlan;

namespace cuda {

class CudaBackend : public Backend {
 public:
  const char* name() const override { return "cuda"; }
  AMP_EXT_LIST_OPS(AMP_EXT_OVERRIDE)
  const char* why_not(const GemmArgs&, int capability) const override;
  Status gemm(const GemmArgs&, Services&) const override;
  const char* why_slow(const GemmArgs&, int capability) const override;
  int64_t variant_of(const GemmTileChoice&) const override;
  std::vector<int64_t> gemm_variants(const GemmArgs&, Services&) const override;
  const char* last_error() const override;

 protected:
  virtual GemmDevice device_of(const Target&) const;
  virtual GemmPlan plan(const GemmArgs&, const GemmDevice&) const;
};

}  // namespace cuda

}  // namespace amp_ext
