// The CUDA launchers, one an op. They allocate nothing, synchronise nothing, never use the default
// stream and check nothing: the bindings have checked.
#pragma once

#include "amp_ext/backend.h"

namespace amp_ext {

struct GemmPlan;

namespace cuda {

Status launch_unscale(const UnscaleArgs&, const Target&);
Status launch_check_finite(const CheckFiniteArgs&, const Target&);
Status launch_grad_norm(const GradNormArgs&, const Target&);
Status launch_cast(const CastArgs&, const Target&);
Status launch_update_scale(const UpdateScaleArgs&, const Target&);

// The plan, of gemm/plan, is for these arguments; it says how large workspace and tickets are.
// Tickets: 0, and 0 again after the launch.
Status launch_gemm(const GemmArgs&, const GemmPlan&, void* workspace, uint32_t* tickets,
                   const Target&);

}  // namespace cuda

}  // namespace amp_ext
