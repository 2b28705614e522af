// Calls a backend. Memory on the host, and the part common to all devices, are here.
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

#include "backends/backends.h"

namespace amp_ext {
namespace {

class HostServices final : public Services {
 public:
  cuda::Target target() override { return {.device = -1}; }

  void* scratch(size_t bytes) override {
    return memory_.emplace_back(c10::GetCPUAllocator()->allocate(bytes)).mutable_get();
  }
  uint32_t* tickets(size_t count) override {
    auto* const tickets = static_cast<uint32_t*>(scratch(count * sizeof(uint32_t)));
    std::fill_n(tickets, count, 0);
    return tickets;
  }
  const void* table(const void* entries, size_t count, size_t entry_bytes) override {
    return std::memcpy(scratch(count * entry_bytes), entries, count * entry_bytes);
  }

 private:
  c10::SmallVector<c10::DataPtr, 3> memory_;
};

}  // namespace

void run(const char* op, const Backend& backend, c10::Device device,
         c10::function_ref<Status(Services&)> launch) {
  Status status;
  if (device.is_cpu()) {
    HostServices services;
    status = launch(services);
  } else {
    status = run_on_cuda(device, launch);
  }
  if (status == Status::ok) return;
  const std::string more = backend.last_error();
  TORCH_CHECK(false, op, ": ", text(status), more.empty() ? "" : ": ", more);
}

}  // namespace amp_ext
