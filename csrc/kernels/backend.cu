#include <cuda_runtime.h>

#include "backend.h"
#include "launchers.h"

namespace amp_ext::cuda {
namespace {

template <class Args, class Ref>
Status launch_list(Args& args, ListOf<Ref>& list, Services& services,
                   Status (*launch)(const Args&, const Target&)) {
  if (list.size > kInlineEntries<EntryOf<Ref>>) {
    if (const Status status = send_table(list, services); status != Status::ok) return status;
  }
  return launch(args, services.target());
}

}  // namespace

Status CudaBackend::unscale(UnscaleArgs args, Services& services) const {
  return launch_list(args, args.grads, services, launch_unscale);
}

Status CudaBackend::check_finite(CheckFiniteArgs args, Services& services) const {
  return launch_list(args, args.grads, services, launch_check_finite);
}

Status CudaBackend::grad_norm(GradNormArgs args, Services& services) const {
  const size_t sums = kGradNormMaxBlocks + (args.norms ? args.grads.size : 0);
  args.partial_sums = static_cast<double*>(services.scratch(sums * sizeof(double)));
  args.tickets = services.tickets(1);
  return launch_list(args, args.grads, services, launch_grad_norm);
}

Status CudaBackend::cast(CastArgs args, Services& services) const {
  return launch_list(args, args.casts, services, launch_cast);
}

Status CudaBackend::update_scale(UpdateScaleArgs args, Services& services) const {
  return launch_update_scale(args, services.target());
}

const char* CudaBackend::why_not(const GemmArgs& g) const {
  return can_run_sm80(g) ? nullptr : "the kernels take no such dtypes, strides or sizes";
}

Status CudaBackend::gemm(const GemmArgs& g, Services& services) const {
  const Target target = services.target();
  const GemmPlan chosen = plan(g, target);
  void* const workspace =
      chosen.workspace_bytes ? services.scratch(chosen.workspace_bytes) : nullptr;
  uint32_t* const tickets = chosen.tickets ? services.tickets(chosen.tickets) : nullptr;
  return launch_gemm(g, chosen, workspace, tickets, target);
}

const char* CudaBackend::last_error() const {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

const Backend& backend() {
  static const CudaBackend instance;
  return instance;
}

}  // namespace amp_ext::cuda
