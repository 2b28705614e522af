// Provides torch's streams and memory of CUDA devices, for launches of CUDA and Triton kernels.
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <bit>
#include <map>
#include <utility>

#include "backends/services.h"

namespace amp_ext {
namespace {

// Device memory that a thread keeps from call to call. It is not from the caching allocator: that
// may allocate it in the memory pool of a CUDA graph, and nothing there may outlive the capture.
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

  // Returns at least `bytes` bytes. Memory that grows is replaced. The old memory is freed once the
  // device has passed it.
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

// The tickets that a thread keeps for a stream: 0 between launches.
KeptMemory& tickets_of(c10::cuda::CUDAStream stream) {
  thread_local std::map<std::pair<c10::DeviceIndex, cudaStream_t>, KeptMemory> kept;
  return kept[{stream.device_index(), stream.stream()}];
}

class CudaServices final : public TorchServices {
 public:
  explicit CudaServices(c10::Device device)
      : TorchServices(device), stream_(c10::cuda::getCurrentCUDAStream(device.index())) {}

  cuda::Target target() override {
    return {.device = device().index(),
            .stream = stream_.stream(),
            .multiprocessors = at::cuda::getDeviceProperties(device().index())->multiProcessorCount,
            .capability = capability_of(device())};
  }

  // During a capture tickets are the graph's own, since it may be replayed at any time.
  uint32_t* tickets(size_t count) override {
    if (is_capturing(device())) return TorchServices::tickets(count);
    KeptMemory& kept = tickets_of(stream_);
    const size_t before = kept.size();
    void* const tickets = kept.reserve(count * sizeof(uint32_t));
    if (kept.size() != before)
      C10_CUDA_CHECK(cudaMemsetAsync(tickets, 0, kept.size(), stream_.stream()));
    return static_cast<uint32_t*>(tickets);
  }

  const void* table(const void* entries, size_t count, size_t entry_bytes) override {
    // Pinned memory is allocated, or events of its earlier copies are queried: either would end a
    // capture of this thread or another.
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    return TorchServices::table(entries, count, entry_bytes);
  }

 private:
  c10::cuda::CUDAStream stream_;
};

}  // namespace

Status run_on_cuda(c10::Device device, c10::function_ref<Status(Services&)> launch) {
  CudaServices services(device);
  return launch(services);
}

int capability_of(c10::Device device) {
  if (!device.is_cuda()) return 0;
  const cudaDeviceProp& properties = *at::cuda::getDeviceProperties(device.index());
  return 10 * properties.major + properties.minor;
}

bool is_capturing(c10::Device device) {
  if (!device.is_cuda()) return false;
  const c10::cuda::CUDAGuard guard(device);
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

void relax_capture_mode() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
}

}  // namespace amp_ext
