// Provides torch's memory for launches.
#pragma once

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <cstring>

#include "backends/backends.h"

namespace amp_ext {

// Serves every device, for a backend that asks torch for the stream.
class TorchServices : public Services {
 public:
  explicit TorchServices(c10::Device device) : guard_(device), device_(device) {}

  cuda::Target target() override { return {.device = device_.is_cpu() ? -1 : device_.index()}; }

  void* scratch(size_t bytes) override {
    // A program may have replaced the allocator of CUDA devices.
    c10::Allocator* const allocator = device_.is_cpu()
                                          ? c10::GetCPUAllocator()
                                          : at::detail::getCUDAHooks().getCUDADeviceAllocator();
    return memory_.emplace_back(allocator->allocate(bytes)).mutable_get();
  }

  uint32_t* tickets(size_t count) override {
    const size_t bytes = count * sizeof(uint32_t);
    void* const tickets = scratch(bytes);
    tensor_at(tickets, bytes).zero_();
    return static_cast<uint32_t*>(tickets);
  }

  const void* table(const void* entries, size_t count, size_t entry_bytes) override {
    const size_t bytes = count * entry_bytes;
    void* const table = scratch(bytes);
    if (device_.is_cpu()) return std::memcpy(table, entries, bytes);
    const at::Tensor staged =
        at::empty(static_cast<int64_t>(bytes), at::TensorOptions(at::kByte).pinned_memory(true));
    std::memcpy(staged.mutable_data_ptr(), entries, bytes);
    // The caching allocator keeps the pinned memory until the copy is done, a graph's for good.
    tensor_at(table, bytes).copy_(staged, /*non_blocking=*/true);
    return table;
  }

 protected:
  c10::Device device() const { return device_; }

 private:
  at::Tensor tensor_at(void* memory, size_t bytes) const {
    return at::for_blob(memory, static_cast<int64_t>(bytes))
        .options(at::TensorOptions(at::kByte).device(device_))
        .target_device(device_)
        .make_tensor();
  }

  c10::DeviceGuard guard_;
  c10::Device device_;
  c10::SmallVector<c10::DataPtr, 3> memory_;  // a caching allocator tracks the stream
};

}  // namespace amp_ext
