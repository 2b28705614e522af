// update_scale_: the next loss scale from every found_inf, by one warp.
#include <cuda_runtime.h>

#include <algorithm>

#include "amp_ext/scale.h"
#include "foreach.cuh"

namespace amp_ext {
namespace {

template <int kCapacity>
struct FoundInfs {
  int count;
  const float* at[kCapacity];
};

template <int kCapacity>
__global__ __launch_bounds__(32) void update_scale_kernel(
    const FoundInfs<kCapacity> __grid_constant__ found_infs,
    const ScaleUpdate __grid_constant__ update) {
  begin_grid();
  bool overflow = false;
  for (int i = threadIdx.x; i < found_infs.count; i += 32) overflow |= *found_infs.at[i] != 0.0f;
  overflow = ptx::warp_any(overflow);
  if (threadIdx.x == 0) close_step(update, overflow);
}

template <int kCapacity>
Status launch_with_capacity(const UpdateScaleArgs& args, cuda::Stream stream) {
  FoundInfs<kCapacity> found_infs;
  found_infs.count = static_cast<int>(args.found_inf_count);
  std::copy_n(args.found_infs, args.found_inf_count, found_infs.at);
  return launch(update_scale_kernel<kCapacity>, 1, 32, 0, stream, found_infs, args.update);
}

}  // namespace

Status cuda::CudaBackend::update_scale(const UpdateScaleArgs& args, Services& services) const {
  const Stream stream = services.target().stream;
  if (args.found_inf_count <= 16) return launch_with_capacity<16>(args, stream);
  if (args.found_inf_count <= kMaxFoundInfs)
    return launch_with_capacity<kMaxFoundInfs>(args, stream);
  return Status::list_too_long;
}

}  // namespace amp_ext
