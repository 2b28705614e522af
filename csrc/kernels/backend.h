// The CUDA kernels as a backend: tables, scratch memory and tickets for each launch.
#pragma once

#include "amp_ext/backend.h"
#include "gemm/plan/choose.h"

namespace amp_ext::cuda {

class CudaBackend : public Backend {
 public:
  const char* name() const override { return "cuda"; }
  Status unscale(UnscaleArgs, Services&) const override;
  Status check_finite(CheckFiniteArgs, Services&) const override;
  Status grad_norm(GradNormArgs, Services&) const override;
  Status cast(CastArgs, Services&) const override;
  Status update_scale(UpdateScaleArgs, Services&) const override;
  const char* why_not(const GemmArgs&) const override;
  Status gemm(const GemmArgs&, Services&) const override;
  const char* last_error() const override;

 protected:
  virtual GemmPlan plan(const GemmArgs& g, const Target& target) const {
    return choose_plan(g, target);
  }
};

const Backend& backend();

}  // namespace amp_ext::cuda
