// Calls a backend. Memory on the host, and the part common to all devices, are here.
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <span>

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

}  // namespace amp_ext
