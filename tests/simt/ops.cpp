// The CUDA launchers for Python, without torch: what csrc/bindings/cuda.cpp does for them. Device
// memory is the host's. Each returns a Status.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>
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

  const TensorRef* refs() const { return refs_.data(); }

 private:
  std::vector<TensorRef> refs_;
  std::vector<ChunkEntry> table_;
};

}  // namespace

extern "C" {

int simt_unscale(const Tensor* grads, int64_t size, float* found_inf, const float* inv_scale,
                 const float* norm, float max_norm) {
  UnscaleArgs args{};
  args.inv_scale = inv_scale;
  args.found_inf = found_inf;
  args.norm = norm;
  args.max_norm = max_norm;
  return List(grads, size).launch(args, cuda::launch_unscale);
}

int simt_check_finite(const Tensor* grads, int64_t size, float* found_inf, int64_t* bad_tensor) {
  CheckFiniteArgs args{};
  args.found_inf = found_inf;
  args.bad_tensor = bad_tensor;
  return List(grads, size).launch(args, cuda::launch_check_finite);
}

// `update` may be null.
int simt_grad_norm(const Tensor* grads, int64_t size, float* found_inf, const float* inv_scale,
                   float* norm, float* norms, const ScaleUpdate* update) {
  static uint32_t tickets = 0;  // every launch leaves it at 0
  std::vector<double> partial_sums(kGradNormMaxBlocks + (norms ? size : 0), NAN);
  GradNormArgs args{};
  args.inv_scale = inv_scale;
  args.found_inf = found_inf;
  args.norm = norm;
  args.norms = norms;
  if (update) args.update = *update;
  args.partial_sums = partial_sums.data();
  args.tickets = &tickets;
  const int status = List(grads, size).launch(args, cuda::launch_grad_norm);
  if (status != 0) tickets = 0;
  return status;
}

int simt_update_scale(const ScaleUpdate* update, const float* const* found_infs, int64_t count) {
  return static_cast<int>(cuda::launch_update_scale({*update, found_infs, count}, nullptr));
}

// The least time, in seconds, to build the list's chunk table and to compare it with the last one.
double simt_table_seconds(const Tensor* tensors, int64_t size) {
  using Clock = std::chrono::steady_clock;
  const List list(tensors, size);
  std::vector<ChunkEntry> last(size);
  double best = INFINITY;
  for (int run = 0; run < 50; ++run) {
    const auto start = Clock::now();
    std::vector<ChunkEntry> entries(size);
    uint32_t chunks = 0;
    build_chunk_table(list.refs(), size, entries.data(), &chunks);
    if (entries != last) last = std::move(entries);
    best = std::min(best, std::chrono::duration<double>(Clock::now() - start).count());
  }
  return best;
}

const char* simt_status_text(int status) { return text(static_cast<Status>(status)); }

}  // extern "C"
