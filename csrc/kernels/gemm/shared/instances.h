// The launchers of the GEMM kernels, one for each type of operands and each in a file of its own.
#pragma once

#include "amp_ext/backend.h"
#include "gemm/plan/tiles.h"

namespace amp_ext {

using GemmLauncher = Status (*)(const GemmArgs&, const GemmPlan&, void* workspace,
                                uint32_t* tickets, cuda::Stream);

Status launch_gemm_f16(const GemmArgs&, const GemmPlan&, void*, uint32_t*, cuda::Stream);
Status launch_gemm_bf16(const GemmArgs&, const GemmPlan&, void*, uint32_t*, cuda::Stream);

// In builds for sm_90a, which define AMP_EXT_SM90.
Status launch_gemm_sm90_f16(const GemmArgs&, const GemmPlan&, void*, uint32_t*, cuda::Stream);
Status launch_gemm_sm90_bf16(const GemmArgs&, const GemmPlan&, void*, uint32_t*, cuda::Stream);

// How many clusters of so many blocks run at once on the current device, which may leave a process
// or a context some multiprocessors only; 0 where the runtime does not say. Asked once a thread.
int active_sm90_clusters(int blocks);

}  // namespace amp_ext
