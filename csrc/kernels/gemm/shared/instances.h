// Declares the launchers of the GEMM kernels: one per operand type, each compiled in its own file.
#pragma once

#include "amp_ext/backend.h"
#include "gemm/plan/tiles.h"

namespace amp_ext {

using GemmLauncher = Status (*)(const GemmArgs&, const GemmPlan&, void* workspace,
                                uint32_t* tickets, cuda::Stream);

Status launch_gemm_f16(const GemmArgs&, const GemmPlan&, void*, uint32_t*, cuda::Stream);
Status launch_gemm_bf16(const GemmArgs&, const GemmPlan&, void*, uint32_t*, cuda::Stream);

// Exist in builds for sm_90a, which define AMP_EXT_SM90.
Status launch_gemm_sm90_f16(const GemmArgs&, const GemmPlan&, void*, uint32_t*, cuda::Stream);
Status launch_gemm_sm90_bf16(const GemmArgs&, const GemmPlan&, void*, uint32_t*, cuda::Stream);

}  // namespace amp_ext
