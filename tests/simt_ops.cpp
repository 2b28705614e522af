// The CUDA launchers for Python, without torch: what csrc/bindings/cuda.cpp does for them. Device
// memory is the host's. Each returns a Status.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <span>
#include <vector>

#include "amp_ext/last_table.h"
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

int simt_unscale(const Tensor* grads, int64_t size, float* found_inf, const float* inv_scale,
                 const float* norm, float max_norm) {
  UnscaleArgs args{};
  args.inv_scale = inv_scale;
  args.found_inf = found_inf;
  args.norm = norm;
  args.max_norm = max_norm;
  return launch(args, args.grads, refs_of(grads, size), cuda::launch_unscale);
}

int simt_check_finite(const Tensor* grads, int64_t size, float* found_inf) {
  CheckFiniteArgs args{};
  args.found_inf = found_inf;
  return launch(args, args.grads, refs_of(grads, size), cuda::launch_check_finite);
}

int simt_grad_norm(const Tensor* grads, int64_t size, float* found_inf, const float* inv_scale,
                   float* norm, float* norms) {
  static uint32_t tickets = 0;  // every launch leaves it at 0
  std::vector<double> partial_sums(kGradNormMaxBlocks + (norms ? size : 0), NAN);
  GradNormArgs args{};
  args.inv_scale = inv_scale;
  args.found_inf = found_inf;
  args.norm = norm;
  args.norms = norms;
  args.partial_sums = partial_sums.data();
  args.tickets = &tickets;
  const int status = launch(args, args.grads, refs_of(grads, size), cuda::launch_grad_norm);
  if (status != 0) tickets = 0;
  return status;
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

int simt_update_scale(const ScaleUpdate* update, const float* const* found_infs, int64_t count) {
  return static_cast<int>(cuda::launch_update_scale({*update, found_infs, count}, nullptr));
}

// The least time, in seconds, to build the list's chunk table and to compare it with the last one.
double simt_table_seconds(const Tensor* tensors, int64_t size) {
  using Clock = std::chrono::steady_clock;
  const std::vector<TensorRef> refs = refs_of(tensors, size);
  LastTable<TensorRef> last;
  double best = INFINITY;
  for (int run = 0; run < 50; ++run) {
    bool differs = false;
    const auto start = Clock::now();
    last.update(refs.data(), size, &differs);
    best = std::min(best, std::chrono::duration<double>(Clock::now() - start).count());
  }
  return best;
}

const char* simt_status_text(int status) { return text(static_cast<Status>(status)); }

}  // extern "C"
