// The CUDA backend: device, stream, device tables and workspace.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "amp_ext/last_table.h"
#include "backend.h"
#include "gemm_plans.h"
#include "ops.h"
#include "staging.h"

namespace amp_ext {
namespace {

bool capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

// Device memory that a thread keeps from call to call. It is not the caching allocator's, which may
// serve the thread from the memory pool of a CUDA graph, where nothing may stay.
class KeptMemory {
 public:
  KeptMemory() = default;
  KeptMemory(const KeptMemory&) = delete;
  KeptMemory& operator=(const KeptMemory&) = delete;
  ~KeptMemory() {
    if (!data_) return;
    // Errors say that the context has gone before.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    (void)cudaFree(data_);
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
  }

  // At least so many bytes; when they are more than ever, new ones. The old ones are freed once the
  // device has passed them.
  void* reserve(size_t bytes) {
    if (bytes <= size_) return data_;
    // Another thread may be capturing.
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    const size_t size = std::bit_ceil(bytes);
    void* grown = nullptr;
    cudaError_t error = cudaMalloc(&grown, size);
    if (error == cudaErrorMemoryAllocation) {
      (void)cudaGetLastError();
      c10::cuda::CUDACachingAllocator::emptyCache();
      error = cudaMalloc(&grown, size);
    }
    C10_CUDA_CHECK(error);
    C10_CUDA_CHECK(cudaFree(std::exchange(data_, grown)));
    size_ = size;
    return data_;
  }
  size_t size() const { return size_; }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

// The last list that was too long for a kernel's parameters.
template <class Ref>
struct SentTable {
  LastTable<Ref> table;
  KeptMemory memory;
};

// What a thread keeps for a stream.
struct StreamState {
  KeptMemory tickets;  // 0 between launches
  std::tuple<SentTable<TensorRef>, SentTable<CastRef>> tables;
};

StreamState& state_of(c10::cuda::CUDAStream stream) {
  thread_local std::map<std::pair<c10::DeviceIndex, cudaStream_t>, StreamState> states;
  return states[{stream.device_index(), stream.stream()}];
}

template <class Entry>
void send(const std::vector<Entry>& entries, void* to, c10::Device device) {
  const auto bytes = static_cast<int64_t>(entries.size() * sizeof(Entry));
  const at::Tensor staged = at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(true));
  std::memcpy(staged.mutable_data_ptr(), entries.data(), bytes);
  // The caching allocator keeps the pinned memory until the copy is done.
  at::from_blob(to, {bytes}, bytes_on(device)).copy_(staged, /*non_blocking=*/true);
  if (capturing()) keep_for_graph(staged);
}

// The chunk table of a list too long for the kernel's parameters, and the memory that it lies in if
// that has to be held until the launch. It is sent when it differs from the last one: gradients
// often stay where they are. A graph being captured has a table of its own for every launch, in
// memory that belongs to the graph, since it may be replayed at any time.
template <class Ref>
at::Tensor attach_table(ListOf<Ref>& list, c10::cuda::CUDAStream stream) {
  using Entry = EntryOf<Ref>;
  if (list.size <= kInlineEntries<Entry>) return {};
  const bool captured = capturing();
  LastTable<Ref> fresh;
  auto& kept = std::get<SentTable<Ref>>(state_of(stream).tables);
  LastTable<Ref>& table = captured ? fresh : kept.table;
  bool differs = false;
  const Status status = table.update(list.refs, list.size, &differs);
  TORCH_CHECK(status == Status::ok, "amp_ext: ", text(status));
  const size_t bytes = list.size * sizeof(Entry);
  at::Tensor of_graph;
  if (captured) of_graph = at::empty({static_cast<int64_t>(bytes)}, bytes_on(stream.device()));
  try {
    void* const memory = captured ? of_graph.mutable_data_ptr() : kept.memory.reserve(bytes);
    if (differs) send(table.entries(), memory, stream.device());
    list.device_table = static_cast<const Entry*>(memory);
    list.device_chunks = table.chunks();
  } catch (...) {
    table.forget();
    throw;
  }
  return of_graph;
}

// So many tickets, all 0, and the memory that they lie in if that has to be held until the launch.
std::pair<uint32_t*, at::Tensor> tickets_for(size_t count, c10::cuda::CUDAStream stream) {
  const size_t bytes = count * sizeof(uint32_t);
  if (bytes == 0) return {};
  if (capturing()) {
    at::Tensor of_graph = at::empty({static_cast<int64_t>(bytes)}, bytes_on(stream.device()));
    C10_CUDA_CHECK(cudaMemsetAsync(of_graph.mutable_data_ptr(), 0, bytes, stream.stream()));
    return {static_cast<uint32_t*>(of_graph.mutable_data_ptr()), of_graph};
  }
  KeptMemory& kept = state_of(stream).tickets;
  const size_t before = kept.size();
  void* const tickets = kept.reserve(bytes);
  if (kept.size() != before)
    C10_CUDA_CHECK(cudaMemsetAsync(tickets, 0, kept.size(), stream.stream()));
  return {static_cast<uint32_t*>(tickets), {}};
}

// Asks the driver once for each device.
GemmDevice gemm_device(c10::Device device) {
  static std::array<std::atomic<int>, C10_COMPILE_TIME_MAX_GPUS> known{};  // negative with sm90
  std::atomic<int>& kept = known[device.index()];
  if (kept == 0) {
    const auto attribute = [&](cudaDeviceAttr which) {
      int value = 0;
      C10_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device.index()));
      return value;
    };
    const int count = attribute(cudaDevAttrMultiProcessorCount);
    bool sm90 = false;
#ifdef AMP_EXT_SM90
    sm90 = attribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
           attribute(cudaDevAttrComputeCapabilityMinor) == 0;
#endif
    kept = sm90 ? -count : count;
  }
  return {std::abs(kept), kept < 0};
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
    const auto tickets = tickets_for(1, c10::cuda::getCurrentCUDAStream(device.index()));
    args.partial_sums = partial_sums.mutable_data_ptr<double>();
    args.tickets = tickets.first;
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
  void gemm(const char* op, const GemmArgs& args, c10::Device device) const override {
    const c10::cuda::CUDAGuard guard(device);
    const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(device.index());
    const GemmPlan plan = chosen_plan(args, gemm_device(device));
    const auto tickets = tickets_for(plan.tickets, stream);
    at::Tensor workspace;
    if (plan.workspace_bytes > 0) workspace = at::empty({plan.workspace_bytes}, bytes_on(device));
    check(
        "amp_ext::gemm",
        cuda::launch_gemm(args, plan, workspace.defined() ? workspace.mutable_data_ptr() : nullptr,
                          tickets.first, stream.stream()));
  }
  bool is_capturing(c10::Device device) const override {
    const c10::cuda::CUDAGuard guard(device);
    return capturing();
  }

 private:
  // `list` is the one of `args`.
  template <class Args, class Ref>
  static void with_list(const char* op, Args& args, ListOf<Ref>& list, c10::Device device,
                        Status (*launch)(const Args&, cuda::Stream)) {
    const c10::cuda::CUDAGuard guard(device);
    const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(device.index());
    const at::Tensor table = attach_table(list, stream);
    check(op, launch(args, stream.stream()));
  }
};

}  // namespace

const Backend& cuda_backend() {
  static const CudaBackend backend;
  return backend;
}

bool cuda_built() { return true; }
bool cuda_serves(const GemmArgs& args) { return can_run_sm80(args); }

TORCH_LIBRARY_IMPL(amp_ext, CUDA, m) { register_ops(m); }

}  // namespace amp_ext
