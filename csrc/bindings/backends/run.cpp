// Calls of a backend: memory on the host, and what all devices share.
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <span>

#include "backends/backends.h"
#include "checks/tensors.h"

namespace amp_ext {
namespace {

class HostServices final : public Services {
 public:
  cuda::Target target() override { return {.device = -1}; }

  void* scratch(size_t bytes) override {
    return memory_.emplace_back(c10::GetCPUAllocator()->allocate(bytes)).mutable_get();
  }
  uint32_t* tickets(size_t count) override {
    auto* const first = static_cast<uint32_t*>(scratch(count * sizeof(uint32_t)));
    std::fill_n(first, count, 0);
    return tickets_.emplace_back(first, count).data();
  }
  const void* table(const void* entries, size_t count, size_t entry_bytes) override {
    return std::memcpy(scratch(count * entry_bytes), entries, count * entry_bytes);
  }

  bool has_tickets_left() const {
    return std::ranges::any_of(tickets_, [](std::span<uint32_t> tickets) {
      return std::ranges::any_of(tickets, [](uint32_t ticket) { return ticket != 0; });
    });
  }

 private:
  c10::SmallVector<c10::DataPtr, 3> memory_;
  c10::SmallVector<std::span<uint32_t>, 1> tickets_;
};

}  // namespace

void run(const char* op, const Backend& backend, c10::Device device,
         c10::function_ref<Status(Services&)> launch) {
  Status status;
  if (device.is_cpu()) {
    HostServices services;
    status = launch(services);
    TORCH_INTERNAL_ASSERT(status != Status::ok || !services.has_tickets_left(), op,
                          ": tickets must be 0 after the launch");
  } else {
    status = run_on_cuda(device, launch);
  }
  if (status == Status::ok) return;
  const std::string more = backend.last_error();
  TORCH_CHECK(false, op, ": ", text(status), more.empty() ? "" : ": ", more);
}

namespace {
std::atomic<int64_t> refused = 0;
}  // namespace

void run_gemm(const char* op, const Backend& backend, c10::Device device, const GemmArgs& args) {
  bool is_refused = false;
  run(op, backend, device, [&](Services& services) {
    const Status status = backend.gemm(args, services);
    is_refused = status == Status::no_tensor_map && !is_under_test();
    return is_refused ? torch_library().gemm(args, services) : status;
  });
  if (is_refused) ++refused;
}

int64_t refused_tensor_maps() { return refused; }

namespace {

at::Tensor blob(void* data, DType dtype, at::IntArrayRef sizes, at::IntArrayRef strides,
                c10::Device device) {
  return at::for_blob(data, sizes)
      .strides(strides)
      .options(at::TensorOptions(scalar_type_of(dtype)).device(device))
      .target_device(device)
      .make_tensor();
}

}  // namespace

at::Tensor tensor_of(const MatrixRef& x, int64_t count, int64_t rows, int64_t columns,
                     c10::Device device) {
  return blob(x.data, x.dtype, {count, rows, columns},
              {x.batch_stride, x.row_stride, x.column_stride}, device);
}

at::Tensor tensor_of(const MatrixRef& x, int64_t rows, int64_t columns, c10::Device device) {
  return blob(x.data, x.dtype, {rows, columns}, {x.row_stride, x.column_stride}, device);
}

at::Tensor tensor_of(const VectorRef& x, int64_t size, c10::Device device) {
  return blob(x.data, x.dtype, {size}, {x.stride}, device);
}

}  // namespace amp_ext
