// A device type's launchers behind one interface: the ops check their tensors once and are the same
// for every device.
#pragma once

#include <c10/core/Device.h>

#include "amp_ext/launch.h"

namespace amp_ext {

// Each call selects the device, takes its current stream, provides device tables and workspace,
// launches, and throws what the launcher returned.
class Backend {
 public:
  virtual void unscale(UnscaleArgs args, c10::Device device) const = 0;
  virtual void check_finite(CheckFiniteArgs args, c10::Device device) const = 0;
  virtual void grad_norm(GradNormArgs args, c10::Device device) const = 0;
  virtual void cast(CastArgs args, c10::Device device) const = 0;
  virtual void update_scale(UpdateScaleArgs args, c10::Device device) const = 0;
  // A product that it serves; `op` is what errors name.
  virtual void gemm(const char* op, const GemmArgs& args, c10::Device device) const = 0;

 protected:
  ~Backend() = default;
};

const Backend& cpu_backend();
const Backend& cuda_backend();  // throws, saying how to rebuild, in a build without CUDA kernels
bool cuda_built();

// Whether the CUDA backend has a kernel for the product; the rest goes to torch's library.
bool cuda_serves(const GemmArgs& args);

// The one that is chosen for a device, and the one that is not Triton's. Throw for a device type
// that has none.
const Backend& backend_for(const char* op, c10::Device device);
const Backend& native_backend_for(const char* op, c10::Device device);

}  // namespace amp_ext
