// The CUDA backend: device, stream, device tables and workspace.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "backend.h"
#include "ops.h"

namespace amp_ext {
namespace {

bool capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

// What a captured graph copies from at every replay is kept for the life of the process, since a
// graph does not say when it goes. (Device memory that a capture allocates belongs to the graph.)
void keep_for_graph(at::Tensor staged) {
  static std::mutex mutex;
  static auto* kept =
      new std::vector<at::Tensor>;  // never destroyed: the CUDA context may go first
  const std::lock_guard<std::mutex> lock(mutex);
  kept->push_back(std::move(staged));
}

at::TensorOptions bytes_on(c10::Device device) {
  return at::TensorOptions(at::kByte).device(device);
}

// Copies a table to the device. The caching allocators keep both copies until the stream has passed
// them.
template <class Entry>
at::Tensor send(const std::vector<Entry>& entries, c10::Device device) {
  const auto bytes = static_cast<int64_t>(entries.size() * sizeof(Entry));
  const at::Tensor staged = at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(true));
  std::memcpy(staged.mutable_data_ptr(), entries.data(), bytes);
  at::Tensor table = at::empty({bytes}, bytes_on(device));
  table.copy_(staged, /*non_blocking=*/true);
  if (capturing()) keep_for_graph(staged);
  return table;
}

// The table of the last list that was too long for a kernel's parameters.
template <class Entry>
struct SentTable {
  std::vector<Entry> entries;
  at::Tensor on_device;
};

// What a stream keeps from call to call.
struct StreamState {
  at::Tensor tickets;  // 0 between launches
  std::tuple<SentTable<ChunkEntry>, SentTable<CastEntry>> tables;
};

// Calls body(state) for the state of the current stream, alone. A graph being captured has a state
// of its own for every launch, since it may be replayed on any stream and after its memory has been
// given back elsewhere.
template <class Body>
auto with_stream_state(c10::cuda::CUDAStream stream, Body body) {
  if (capturing()) {
    StreamState fresh;
    return body(fresh);
  }
  static std::mutex mutex;
  // Never destroyed, like what graphs keep.
  static auto* states = new std::map<cudaStream_t, StreamState>[C10_COMPILE_TIME_MAX_GPUS];
  const std::lock_guard<std::mutex> lock(mutex);
  return body(states[stream.device_index()][stream.stream()]);
}

// The chunk table of a list too long for the kernel's parameters. It is sent when it differs from
// the last one: gradients often stay where they are.
template <class Ref>
at::Tensor table_for(ListOf<Ref>& list, c10::cuda::CUDAStream stream) {
  using Entry = EntryOf<Ref>;
  if (list.size <= kInlineEntries<Entry>) return {};
  return with_stream_state(stream, [&](StreamState& state) {
    auto& last = std::get<SentTable<Entry>>(state.tables);
    std::vector<Entry> entries(list.size);
    const Status status =
        build_chunk_table(list.refs, list.size, entries.data(), &list.device_chunks);
    TORCH_CHECK(status == Status::ok, "amp_ext: ", text(status));
    if (entries != last.entries) {
      last.on_device = send(entries, stream.device());
      last.entries = std::move(entries);
    }
    list.device_table = static_cast<const Entry*>(last.on_device.const_data_ptr());
    return last.on_device;
  });
}

at::Tensor tickets_for(c10::cuda::CUDAStream stream) {
  return with_stream_state(stream, [&](StreamState& state) {
    if (!state.tickets.defined())
      state.tickets = at::zeros({sizeof(uint32_t)}, bytes_on(stream.device()));
    return state.tickets;
  });
}

void check(const char* op, Status status) {
  if (status == Status::ok) return;
  if (status == Status::launch_failed) {
    TORCH_CHECK(false, op, ": ", text(status), ": ", cudaGetErrorString(cudaGetLastError()));
  }
  TORCH_CHECK(false, op, ": ", text(status));
}

class CudaBackend final : public Backend {
 public:
  void unscale(UnscaleArgs args, c10::Device device) const override {
    with_list("amp_ext::unscale_", args, args.grads, device, cuda::launch_unscale);
  }
  void check_finite(CheckFiniteArgs args, c10::Device device) const override {
    with_list("amp_ext::check_finite", args, args.grads, device, cuda::launch_check_finite);
  }
  void grad_norm(GradNormArgs args, c10::Device device) const override {
    const c10::cuda::CUDAGuard guard(device);
    const int64_t sums = kGradNormMaxBlocks + (args.norms ? args.grads.size : 0);
    const at::Tensor partial_sums = at::empty({sums}, bytes_on(device).dtype(at::kDouble));
    const at::Tensor tickets = tickets_for(c10::cuda::getCurrentCUDAStream(device.index()));
    args.partial_sums = partial_sums.mutable_data_ptr<double>();
    args.tickets = static_cast<uint32_t*>(tickets.mutable_data_ptr());
    with_list("amp_ext::grad_norm", args, args.grads, device, cuda::launch_grad_norm);
  }
  void cast(CastArgs args, c10::Device device) const override {
    with_list("amp_ext::cast_", args, args.casts, device, cuda::launch_cast);
  }
  void update_scale(UpdateScaleArgs args, c10::Device device) const override {
    const c10::cuda::CUDAGuard guard(device);
    check(
        "amp_ext::update_scale_",
        cuda::launch_update_scale(args, c10::cuda::getCurrentCUDAStream(device.index()).stream()));
  }
  void gemm(GemmArgs, c10::Device) const override {
    TORCH_INTERNAL_ASSERT(false, "cuda_serves() turned the product down");
  }

 private:
  // `list` is the one of `args`.
  template <class Args, class Ref>
  static void with_list(const char* op, Args& args, ListOf<Ref>& list, c10::Device device,
                        Status (*launch)(const Args&, cuda::Stream)) {
    const c10::cuda::CUDAGuard guard(device);
    const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(device.index());
    const at::Tensor table = table_for(list, stream);
    check(op, launch(args, stream.stream()));
  }
};

}  // namespace

const Backend& cuda_backend() {
  static const CudaBackend backend;
  return backend;
}

bool cuda_built() { return true; }
bool cuda_serves(const GemmArgs&) { return false; }

TORCH_LIBRARY_IMPL(amp_ext, CUDA, m) { register_ops(m); }

}  // namespace amp_ext
