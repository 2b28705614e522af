// Declares the backends, their choice and their calls.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/FunctionRef.h>

#include <optional>
#include <string>
#include <vector>

#include "amp_ext/backend.h"
#include "amp_ext/host.h"
#include "backends/verified.h"

namespace amp_ext {

const Backend& cpu_backend();
const Backend* cuda_backend();  // null without the CUDA kernels
const Backend& triton_backend();

// ---- shared libraries --------------------------------------------------------------------------

// Loads the library (amp_ext/library.h) of the CPU's or the CUDA kernels. Returns the architectures
// of its GPU code. Raises ImportError, and keeps nothing, if the file is no library or is compiled
// with other headers. The message ends with `remedy`.
std::string load_backend(const std::string& path, const std::string& remedy);

// Returns torch's functions for the CPU's backend.
const Host& host();

// Returns Backend::product_step of torch's library on a CPU; 0 while oneDNN is turned off.
int64_t torchs_product_step(DType dtype);

// ---- the choice --------------------------------------------------------------------------------

// Selects the backend of later calls on a type of device: "cpu", "cuda" or "triton". If the name is
// empty, calls run on the device's own backend, and products on any backend that was measured. The
// policy is in amp_ext/backend.py.
void use_backend(c10::DeviceType type, const std::string& name);

// Runs later calls of ops on lists, by this thread, on the named backend. Other choices and
// verifications do not count. The CUDA backend's calls then end no other thread's capture of a CUDA
// graph.
void put_under_test(const std::string& name);
bool is_under_test(const Backend& backend);

// Sets the choice of a product's backend, AMP_EXT_GEMM. "auto" chooses by the table (table.h).
// Products without an entry run on torch's library, or on a CPU by a rule. "kernel" chooses the
// device's backend wherever it can compute the product. "library" leaves out the table.
void set_gemm_mode(const std::string& mode);
std::string gemm_mode();

// Returns the chosen backend of ops on lists, verified or not. Throws for a device without one.
const Backend& choose(const char* op, c10::Device device);

// Returns the chosen backend. If its kernels of the family are known to be wrong on the device,
// returns the Triton kernels; throws if those are wrong too. Kernels without an answer count as
// right.
const Backend& choose_verified(const char* op, Family family, c10::Device device);

// Returns the backend of a product, and sets args.variant; null stands for torch's own library.
// `reason` receives the reason for the choice, if it is not null.
const Backend* choose_gemm(c10::Device device, GemmArgs& args, std::string* reason = nullptr);

// Returns the backends that may compute a product. The default without measurements comes first.
// The Triton kernels are among them if they can be used, or are the device's backend.
std::vector<const Backend*> gemm_candidates(c10::Device device, const GemmArgs& args, bool triton);

inline const char* name_of(const Backend* backend) { return backend ? backend->name() : "library"; }

// Returns the backend of this name that computes products on a type of device, if there is one;
// null stands for torch's own library.
std::optional<const Backend*> gemm_backend(c10::DeviceType type, const std::string& name);

// ---- the call ----------------------------------------------------------------------------------

// Calls launch(services) with torch's current stream and torch's memory on the device, and throws,
// naming the op, if the status is not ok.
void run(const char* op, const Backend& backend, c10::Device device,
         c10::function_ref<Status(Services&)> launch);

// Calls an op on lists by the device's backend.
template <class Args>
void run(const char* op, c10::Device device,
         Status (ListBackend::*method)(const Args&, Services&) const, const Args& args) {
  const Backend& backend = choose_verified(op, family_of(args), device);
  run(op, backend, device, [&](Services& services) { return (backend.*method)(args, services); });
}

// Calls launch(services) likewise on a CUDA device, and returns its status. The function is in
// cuda.cpp, or without the CUDA kernels in none.cpp, and so are the next three functions.
Status run_on_cuda(c10::Device device, c10::function_ref<Status(Services&)> launch);

// Returns the compute capability of a GPU, 90 for 9.0; 0 for the CPU, and without the CUDA kernels.
int capability_of(c10::Device device);

// Returns whether the device's current stream is being captured in a CUDA graph.
bool is_capturing(c10::Device device);

// From now on, this thread may wait for a device while another thread captures a graph.
void relax_capture_mode();

inline c10::Device device_of(Services& services) {
  const int index = services.target().device;
  return index < 0 ? c10::Device(at::kCPU)
                   : c10::Device(at::kCUDA, static_cast<c10::DeviceIndex>(index));
}

}  // namespace amp_ext
