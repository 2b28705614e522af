// Replaces cuda.cpp in a build without the CUDA kernels. torch's own ops provide memory of CUDA
// devices for the Triton kernels.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>

#include <cstring>

#include "backends/backends.h"
#include "backends/python.h"

namespace amp_ext {
namespace {

class DeviceServices final : public Services {
 public:
  explicit DeviceServices(c10::Device device) : guard_(device), device_(device) {}

  cuda::Target target() override { return {.device = device_.index()}; }  // Triton queries torch
  void* scratch(size_t bytes) override {
    return keep(at::empty({static_cast<int64_t>(bytes)}, bytes_on(device_)));
  }
  uint32_t* tickets(size_t count) override {
    return static_cast<uint32_t*>(
        keep(at::zeros({static_cast<int64_t>(count * sizeof(uint32_t))}, bytes_on(device_))));
  }
  const void* table(const void* entries, size_t count, size_t entry_bytes) override {
    const auto bytes = static_cast<int64_t>(count * entry_bytes);
    // The caching allocator keeps the pinned memory until the copy is done, a graph's for good.
    const at::Tensor staged = at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(true));
    std::memcpy(staged.mutable_data_ptr(), entries, bytes);
    return keep(staged.to(device_, /*non_blocking=*/true));
  }

 private:
  void* keep(at::Tensor memory) {
    return memory_.emplace_back(std::move(memory)).mutable_data_ptr();
  }

  c10::DeviceGuard guard_;
  c10::Device device_;
  c10::SmallVector<at::Tensor, 3> memory_;  // of the caching allocator: it tracks the stream
};

}  // namespace

Status run_on_cuda(c10::Device device, c10::function_ref<Status(Services&)> launch) {
  DeviceServices services(device);
  return launch(services);
}

int capability_of(c10::Device) { return 0; }

bool is_capturing(c10::Device device) {
  if (!device.is_cuda()) return false;
  const c10::DeviceGuard guard(device);
  const UntracedPython python;
  return pybind11::module_::import("torch.cuda").attr("is_current_stream_capturing")().cast<bool>();
}

void relax_capture_mode() {}

}  // namespace amp_ext
