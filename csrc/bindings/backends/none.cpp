// Replaces cuda.cpp in a build without the CUDA kernels, where the Triton kernels may run.
#include <pybind11/pybind11.h>

#include "backends/python.h"
#include "backends/services.h"

namespace amp_ext {

Status run_on_cuda(c10::Device device, c10::function_ref<Status(Services&)> launch) {
  TorchServices services(device);
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
