// gemm: products of fp16 and bf16 on tensor cores, in one launch.
#include "backend.h"
#include "gemm/plan/choose.h"
#include "gemm/shared/instances.h"

namespace amp_ext {
namespace {

GemmLauncher launcher(DType operands, bool sm90) {
  const bool half = operands == DType::f16;
#ifdef AMP_EXT_SM90
  if (sm90) return half ? launch_gemm_sm90_f16 : launch_gemm_sm90_bf16;
#endif
#ifdef AMP_EXT_SM80
  if (!sm90) return half ? launch_gemm_f16 : launch_gemm_bf16;
#endif
  return nullptr;
}

}  // namespace

namespace cuda {

// Excludes compute capabilities 10 and 11. Without tcgen05 the sm_80 kernel would take four times
// as long there as torch's library, and the driver would compile it for tens of seconds.
const char* CudaBackend::why_not(const GemmArgs& g, int capability) const {
#ifndef AMP_EXT_SM80
  return "this build has no kernel for products";
#endif
  const int major = capability / 10;
  if (major < 8 || major == 10 || major == 11)
    return "the CUDA kernels compute no products on compute capability 7.x, 10.x and 11.x";
  return can_run_sm80(g) ? nullptr : "the kernels take no such dtypes, strides or sizes";
}

// Names products that TMA cannot load or store. Only the sm_80 kernel computes these, without
// wgmma.
const char* CudaBackend::why_slow(const GemmArgs& g, int capability) const {
  return capability == 90 && !can_run_sm90(g)
             ? "not measured, and TMA takes no such addresses, strides or sizes: torch's library"
             : nullptr;
}

GemmDevice CudaBackend::device_of(const Target& target) const {
#ifdef AMP_EXT_SM90
  return {target.multiprocessors, target.capability == 90};
#else
  return {target.multiprocessors, false};
#endif
}

GemmPlan CudaBackend::plan(const GemmArgs& g, const GemmDevice& device) const {
  return choose_plan(g, device);
}

int64_t CudaBackend::variant_of(const GemmTileChoice& tile) const {
  return amp_ext::variant_of(tile);
}

std::vector<int64_t> CudaBackend::gemm_variants(const GemmArgs& g, Services& services) const {
  return plan_variants(g, device_of(services.target()));
}

Status CudaBackend::gemm(const GemmArgs& args, Services& services) const {
  // The stride of a dimension of size 1 has no effect. Setting it to 0 keeps addresses aligned that
  // are computed but not read.
  GemmArgs g = args;
  if (g.m <= 1) g.a.row_stride = 0;
  if (g.n <= 1) g.b.column_stride = 0;
  if (g.k <= 1) g.a.column_stride = g.b.row_stride = 0;
  if (g.batch * g.terms <= 1) g.a.batch_stride = g.b.batch_stride = 0;
  const Target target = services.target();
  const GemmPlan chosen = plan(args, device_of(target));
  if (chosen.blocks == 0) return Status::ok;
  const GemmLauncher launch = launcher(g.a.dtype, chosen.sm90);
  if (!launch) return Status::not_built;
  void* const workspace =
      chosen.workspace_bytes ? services.scratch(chosen.workspace_bytes) : nullptr;
  uint32_t* const tickets = chosen.tickets ? services.tickets(chosen.tickets) : nullptr;
  return launch(g, chosen, workspace, tickets, target.stream);
}

}  // namespace cuda

}  // namespace amp_ext
