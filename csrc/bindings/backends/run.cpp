// Calls a backend.
#include <c10/util/Exception.h>

#include "backends/services.h"

namespace amp_ext {

void run(const char* op, const Backend& backend, c10::Device device,
         c10::function_ref<Status(Services&)> launch) {
  Status status;
  if (device.is_cpu()) {
    TorchServices services(device);
    status = launch(services);
  } else {
    status = run_on_cuda(device, launch);
  }
  if (status == Status::ok) return;
  const std::string more = backend.last_error();
  TORCH_CHECK(false, op, ": ", text(status), more.empty() ? "" : ": ", more);
}

}  // namespace amp_ext
