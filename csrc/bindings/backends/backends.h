// The backends of this build, which of them runs a call, and how it is called.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/FunctionRef.h>

#include <string>

#include "amp_ext/backend.h"

namespace amp_ext {

const Backend& cpu_backend();
const Backend* cuda_backend();  // null in a build without the CUDA kernels
const Backend& triton_backend();
const Backend& torch_library();  // products only

// ---- the choice --------------------------------------------------------------------------------

// From now on calls on a type of device run on the named backend: "cpu", "cuda", "triton" or one
// that load_backend has returned. The policy is in amp_ext/backend.py.
void use_backend(c10::DeviceType type, const std::string& name);

// Loads a backend from a shared library, whose function `const amp_ext::Backend* amp_ext_backend()`
// returns it. Its tensors are in host memory. Returns its name.
std::string load_backend(const std::string& path);

// Whether the backends other than the CPU's compute those products that they can compute; else
// torch's library does.
void use_gemm_kernels(bool on);
bool uses_gemm_kernels();

// Whether the tensors of a type of device have a backend for ops on lists.
bool has_backend(c10::DeviceType type);

// The backend of an op on lists. Throws for a device that has none.
const Backend& choose(const char* op, c10::Device device);

// The backend of a product; `reason` receives why it is this one, if it is not null.
const Backend& choose_gemm(c10::Device device, const GemmArgs& args, std::string* reason = nullptr);

// ---- the call ----------------------------------------------------------------------------------

// Calls launch(services) with torch's current stream and torch's memory on the device, and throws,
// naming the op, if the status is not ok.
void run(const char* op, const Backend& backend, c10::Device device,
         c10::function_ref<Status(Services&)> launch);

// The same of an op on lists, by the backend of the device.
template <class Args>
void run(const char* op, c10::Device device,
         Status (Backend::*method)(const Args&, Services&) const, const Args& args) {
  const Backend& backend = choose(op, device);
  run(op, backend, device, [&](Services& services) { return (backend.*method)(args, services); });
}

// In cuda.cpp, or without the CUDA kernels in none.cpp: the same on a CUDA device, without the
// check.
Status run_on_cuda(c10::Device device, c10::function_ref<Status(Services&)> launch);

// Likewise: whether the device's current stream is being captured in a CUDA graph.
bool is_capturing(c10::Device device);

inline at::TensorOptions bytes_on(c10::Device device) {
  return at::TensorOptions(at::kByte).device(device);
}

// ---- for backends that take tensors ------------------------------------------------------------

inline c10::Device device_of(Services& services) {
  const int index = services.target().device;
  return index < 0 ? c10::Device(at::kCPU)
                   : c10::Device(at::kCUDA, static_cast<c10::DeviceIndex>(index));
}

// Arguments of a product without a copy: tensors [count, rows, columns], [rows, columns] and
// [size].
at::Tensor tensor_of(const MatrixRef& matrix, int64_t count, int64_t rows, int64_t columns,
                     c10::Device device);
at::Tensor tensor_of(const MatrixRef& matrix, int64_t rows, int64_t columns, c10::Device device);
at::Tensor tensor_of(const VectorRef& vector, int64_t size, c10::Device device);

}  // namespace amp_ext
