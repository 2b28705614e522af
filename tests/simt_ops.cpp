// The CUDA launchers for Python, without torch: what csrc/bindings/cuda.cpp does for them. Device
// memory is the host's. Each returns a Status.
#include <vector>

#include "amp_ext/launch.h"

namespace {

using namespace amp_ext;

struct Tensor {
  void* data;
  int64_t numel;
  int64_t dtype;
};

// The list, and its chunk table where it is too long for a kernel's parameters.
class List {
 public:
  List(const Tensor* tensors, int64_t size) {
    for (int64_t i = 0; i < size; ++i)
      refs_.push_back({tensors[i].data, tensors[i].numel, static_cast<DType>(tensors[i].dtype)});
  }

  template <class Args>
  int launch(Args args, Status (*launcher)(const Args&, cuda::Stream)) {
    args.grads = {refs_.data(), static_cast<int64_t>(refs_.size())};
    if (args.grads.size > kInlineTensors) {
      table_.resize(refs_.size());
      const Status status = build_chunk_table(args.grads.tensors, args.grads.size, table_.data(),
                                              &args.grads.device_chunks);
      if (status != Status::ok) return static_cast<int>(status);
      args.grads.device_table = table_.data();
    }
    return static_cast<int>(launcher(args, nullptr));
  }

 private:
  std::vector<TensorRef> refs_;
  std::vector<ChunkEntry> table_;
};

}  // namespace

extern "C" {

int simt_unscale(const Tensor* grads, int64_t size, float* found_inf, const float* inv_scale) {
  UnscaleArgs args{};
  args.inv_scale = inv_scale;
  args.found_inf = found_inf;
  return List(grads, size).launch(args, cuda::launch_unscale);
}

int simt_check_finite(const Tensor* grads, int64_t size, float* found_inf, int64_t* bad_tensor) {
  CheckFiniteArgs args{};
  args.found_inf = found_inf;
  args.bad_tensor = bad_tensor;
  return List(grads, size).launch(args, cuda::launch_check_finite);
}

int simt_grad_norm(const Tensor* grads, int64_t size, float* found_inf, const float* inv_scale,
                   float* norm) {
  std::vector<double> workspace(kGradNormWorkspaceBytes / sizeof(double));
  GradNormArgs args{};
  args.inv_scale = inv_scale;
  args.found_inf = found_inf;
  args.norm = norm;
  args.workspace = workspace.data();
  return List(grads, size).launch(args, cuda::launch_grad_norm);
}

int simt_update_scale(float* scale, int32_t* growth_tracker, int32_t* hysteresis_tracker,
                      int64_t* skipped_steps, const float* const* found_infs, int64_t count,
                      double growth_factor, double backoff_factor, int64_t growth_interval,
                      int32_t hysteresis, float min_scale, float max_scale) {
  const UpdateScaleArgs args{scale,           growth_tracker, hysteresis_tracker, skipped_steps,
                             found_infs,      count,          growth_factor,      backoff_factor,
                             growth_interval, hysteresis,     min_scale,          max_scale};
  return static_cast<int>(cuda::launch_update_scale(args, nullptr));
}

const char* simt_status_text(int status) { return text(static_cast<Status>(status)); }

}  // extern "C"
