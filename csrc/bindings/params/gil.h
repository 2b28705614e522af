// Releases the GIL during launches.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

#include "backends/backends.h"

namespace amp_ext {

// The fewest elements at which a pass over a list on a CPU lets other Python threads run.
constexpr int64_t kLongPass = 1 << 18;

// Releases the GIL for launches that run Python code, take long on a CPU, or wait for a device, as
// a verification does: another thread may have to launch the work that it waits for. The caller
// keeps alive all tensors that the launches use, once is_needed() returns true.
class GilRelease {
 public:
  // Adds a launch over `numel` elements. Throws where the device has no backend for `op`.
  void add(const char* op, Family family, at::Device device, int64_t numel) {
    const Backend& backend = choose(op, device);
    is_needed_ |= &backend == &triton_backend() || !has_passed(backend, family, device);
    if (device.is_cpu()) is_needed_ |= (cpu_numel_ += numel) >= kLongPass;
  }
  bool is_needed() const { return is_needed_; }
  void begin() {
    if (is_needed_) released_.emplace();
  }
  void end() { released_.reset(); }

 private:
  int64_t cpu_numel_ = 0;
  bool is_needed_ = false;
  std::optional<pybind11::gil_scoped_release> released_;
};

}  // namespace amp_ext
