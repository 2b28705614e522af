// The backends, which of them runs a call, and how it is called.
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

// Loads a library (amp_ext/library.h) and keeps its backend by its name, in the place of an older
// one of this name. Raises ImportError, and keeps nothing, if it is none or is compiled with other
// headers; the message ends with `remedy`. Returns the architectures of its GPU code.
std::string load_backend(const std::string& path, const std::string& remedy);

// Null if none of this name has been loaded.
const Backend* loaded_backend(const std::string& name);

// What torch does for the CPU's.
const Host& host();

// Whether torch's library multiplies a 16-bit type with this processor's instructions for it.
bool torch_has_products_of(DType dtype);

// ---- the choice --------------------------------------------------------------------------------

// From now on calls on a type of device run on the named backend: "cpu", "cuda", "triton", one that
// load_backend has returned, or, if the name is empty, on the device's own, where products may be
// computed by any that was measured. The policy is in amp_ext/backend.py.
void use_backend(c10::DeviceType type, const std::string& name);

// From now on calls of this thread run on the named backend, products by these of its kernels,
// whatever else is chosen and whether it has been verified or not; and those of the CUDA backend
// end no other thread's capture of a CUDA graph.
void put_under_test(const std::string& name, GemmKernels kernels);
bool is_under_test();

// From now on products of this thread that the CUDA kernels compute, for a test or by
// AMP_EXT_GEMM=kernel, are computed with this tile if it can, whatever the planner thinks. Throws
// ValueError if there is no such tile; then none is forced.
void force_gemm_tile(const std::optional<GemmTileChoice>& tile);

// How many tiles the CUDA kernels have for sm_90a or for sm_80.
int gemm_tile_count(bool sm90);

// How the backend of a product is chosen, AMP_EXT_GEMM: "auto", as it was measured (table.h), what
// was not by torch's library, or on a CPU by a rule; "kernel", by the device's backend wherever it
// can; "library", nothing by the table.
void set_gemm_mode(const std::string& mode);
std::string gemm_mode();

// The backend that is chosen for ops on lists, verified or not. Throws for a device that has none.
const Backend& choose(const char* op, c10::Device device);

// The backend of a product, and its args.variant; null for torch's own library. `reason` receives
// why it is this one, if it is not null.
const Backend* choose_gemm(c10::Device device, GemmArgs& args, std::string* reason = nullptr);

// The backends that may compute a product, the one that does where nothing is measured first, by
// those of their kernels that are left in `args`. The Triton kernels are among them if they can be
// used, or are the device's backend.
std::vector<const Backend*> gemm_candidates(c10::Device device, GemmArgs& args, bool triton);

// As GemmBackend::gemm_kernels.
std::optional<GemmKernels> gemm_kernels(const Backend& backend, c10::Device device);

inline const char* name_of(const Backend* backend) { return backend ? backend->name() : "library"; }

// The one of this name that may compute products on a type of device; none if there is none.
std::optional<const Backend*> gemm_backend(c10::DeviceType type, const std::string& name);

// ---- the call ----------------------------------------------------------------------------------

// Calls launch(services) with torch's current stream and torch's memory on the device, and throws,
// naming the op, if the status is not ok.
void run(const char* op, const Backend& backend, c10::Device device,
         c10::function_ref<Status(Services&)> launch);

// In cuda.cpp, or without the CUDA kernels in none.cpp: the same on a CUDA device, without the
// check.
Status run_on_cuda(c10::Device device, c10::function_ref<Status(Services&)> launch);

// Likewise: whether the device's current stream is being captured in a CUDA graph.
bool is_capturing(c10::Device device);

// Likewise: from now on this thread may wait for a device while another one captures a graph.
void relax_capture_mode();

inline at::TensorOptions bytes_on(c10::Device device) {
  return at::TensorOptions(at::kByte).device(device);
}

inline c10::Device device_of(Services& services) {
  const int index = services.target().device;
  return index < 0 ? c10::Device(at::kCPU)
                   : c10::Device(at::kCUDA, static_cast<c10::DeviceIndex>(index));
}

}  // namespace amp_ext
