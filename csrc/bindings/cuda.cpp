// The CUDA backend: device, stream, device tables and workspace.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include <mutex>
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

// The chunk table of a list too long for the kernel's parameters, on its way to the device. The
// caching allocators keep both copies until the stream has passed them.
template <class Ref>
at::Tensor send_table(ListOf<Ref>& list, c10::Device device) {
  using Entry = EntryOf<Ref>;
  if (list.size <= kInlineEntries<Entry>) return {};
  const auto bytes = static_cast<int64_t>(list.size * sizeof(Entry));
  const at::Tensor staged = at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(true));
  const Status status = build_chunk_table(
      list.refs, list.size, static_cast<Entry*>(staged.mutable_data_ptr()), &list.device_chunks);
  TORCH_CHECK(status == Status::ok, "amp_ext: ", text(status));
  at::Tensor table = at::empty({bytes}, at::TensorOptions(at::kByte).device(device));
  table.copy_(staged, /*non_blocking=*/true);
  if (capturing()) keep_for_graph(staged);
  list.device_table = static_cast<const Entry*>(table.const_data_ptr());
  return table;
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
    const at::Tensor workspace =
        at::zeros({kGradNormWorkspaceBytes}, at::TensorOptions(at::kByte).device(device));
    args.workspace = workspace.mutable_data_ptr();
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

 private:
  // `list` is the one of `args`.
  template <class Args, class Ref>
  static void with_list(const char* op, Args& args, ListOf<Ref>& list, c10::Device device,
                        Status (*launch)(const Args&, cuda::Stream)) {
    const c10::cuda::CUDAGuard guard(device);
    const at::Tensor table = send_table(list, device);
    check(op, launch(args, c10::cuda::getCurrentCUDAStream(device.index()).stream()));
  }
};

}  // namespace

const Backend& cuda_backend() {
  static const CudaBackend backend;
  return backend;
}

bool cuda_built() { return true; }

TORCH_LIBRARY_IMPL(amp_ext, CUDA, m) { register_ops(m); }

}  // namespace amp_ext
