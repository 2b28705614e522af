// The CUDA launchers for Python, without torch: what csrc/bindings/cuda.cpp does for them. Device
// memory is the host's. Each returns a Status.
#include <span>
#include <vector>

#include "amp_ext/launch.h"

namespace {

using namespace amp_ext;

struct Tensor {
  void* data;
  int64_t numel;
  int64_t dtype;

  DType type() const { return static_cast<DType>(dtype); }
};

// Launches on a list, `list` of `args`, with a chunk table where it is too long for a kernel's
// parameters.
template <class Args, class Ref>
int launch(Args& args, ListOf<Ref>& list, const std::vector<Ref>& refs,
           Status (*launcher)(const Args&, cuda::Stream)) {
  list = {refs.data(), static_cast<int64_t>(refs.size())};
  std::vector<EntryOf<Ref>> table;
  if (list.size > kInlineEntries<EntryOf<Ref>>) {
    table.resize(refs.size());
    const Status status =
        build_chunk_table(list.refs, list.size, table.data(), &list.device_chunks);
    if (status != Status::ok) return static_cast<int>(status);
    list.device_table = table.data();
  }
  return static_cast<int>(launcher(args, nullptr));
}

std::vector<TensorRef> refs_of(const Tensor* tensors, int64_t size) {
  std::vector<TensorRef> refs;
  for (const Tensor& t : std::span(tensors, size)) refs.push_back({t.data, t.numel, t.type()});
  return refs;
}

}  // namespace

extern "C" {

int simt_unscale(const Tensor* grads, int64_t size, float* found_inf, const float* inv_scale) {
  UnscaleArgs args{};
  args.inv_scale = inv_scale;
  args.found_inf = found_inf;
  return launch(args, args.grads, refs_of(grads, size), cuda::launch_unscale);
}

int simt_check_finite(const Tensor* grads, int64_t size, float* found_inf, int64_t* bad_tensor) {
  CheckFiniteArgs args{};
  args.found_inf = found_inf;
  args.bad_tensor = bad_tensor;
  return launch(args, args.grads, refs_of(grads, size), cuda::launch_check_finite);
}

int simt_grad_norm(const Tensor* grads, int64_t size, float* found_inf, const float* inv_scale,
                   float* norm) {
  std::vector<double> workspace(kGradNormWorkspaceBytes / sizeof(double));
  GradNormArgs args{};
  args.inv_scale = inv_scale;
  args.found_inf = found_inf;
  args.norm = norm;
  args.workspace = workspace.data();
  return launch(args, args.grads, refs_of(grads, size), cuda::launch_grad_norm);
}

int simt_cast(const Tensor* outputs, const Tensor* inputs, int64_t size) {
  std::vector<CastRef> refs;
  for (int64_t i = 0; i < size; ++i) {
    refs.push_back(
        {outputs[i].data, inputs[i].data, outputs[i].numel, outputs[i].type(), inputs[i].type()});
  }
  CastArgs args{};
  return launch(args, args.casts, refs, cuda::launch_cast);
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
