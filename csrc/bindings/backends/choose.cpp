// Which backend runs a call.
#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <array>
#include <atomic>
#include <map>

#include "backends/backends.h"

namespace amp_ext {
namespace {

std::atomic<bool> gemm_kernels = false;

// null: the device's own.
std::array<std::atomic<const Backend*>, 2> chosen{};

std::map<std::string, const Backend*>& loaded() {
  static std::map<std::string, const Backend*> instance;
  return instance;
}

thread_local const Backend* under_test = nullptr;

// null where there is none.
const Backend* backend_of(c10::DeviceType type) {
  if (type != at::kCPU && type != at::kCUDA) return nullptr;
  if (under_test) return under_test;
  if (const Backend* const backend = chosen[type == at::kCUDA]) return backend;
  return type == at::kCPU ? &cpu_backend() : cuda_backend();
}

// null: the device's own.
const Backend* backend_named(const std::string& name) {
  if (name == "triton") return &triton_backend();
  if (const auto found = loaded().find(name); found != loaded().end()) return found->second;
  TORCH_CHECK_VALUE(name == "cpu" || name == "cuda", "amp_ext: unknown backend ", name);
  return nullptr;
}

}  // namespace

void use_backend(c10::DeviceType type, const std::string& name) {
  TORCH_CHECK_VALUE(type == at::kCPU || type == at::kCUDA, "amp_ext: device type must be cpu or ",
                    "cuda, got ", type);
  chosen[type == at::kCUDA] = backend_named(name);
}

void put_under_test(const std::string& name) {
  under_test = name == "cuda" ? cuda_backend() : backend_named(name);
}
bool is_under_test() { return under_test; }

std::string load_backend(const std::string& path) {
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  TORCH_CHECK(library, "amp_ext: cannot load the backend ", path, ": ", dlerror());
  void* const function = dlsym(library, "amp_ext_backend");
  TORCH_CHECK(function, "amp_ext: ", path, " has no function amp_ext_backend");
  const Backend* const backend = reinterpret_cast<const Backend* (*)()>(function)();
  loaded()[backend->name()] = backend;
  return backend->name();
}

void use_gemm_kernels(bool on) { gemm_kernels = on; }
bool uses_gemm_kernels() { return gemm_kernels; }

bool has_backend(c10::DeviceType type) { return backend_of(type) != nullptr; }

const Backend& choose(const char* op, c10::Device device) {
  TORCH_CHECK_NOT_IMPLEMENTED(device.is_cpu() || device.is_cuda(), op,
                              ": tensors must be on the CPU or a CUDA device, got ", device);
  const Backend* const backend = backend_of(device.type());
  TORCH_CHECK(backend, op,
              ": amp_ext was built without CUDA kernels and was given a CUDA tensor; install "
              "Triton for its "
              "Triton kernels, or, with a CUDA toolkit and a CUDA build of torch installed, "
              "rebuild it from "
              "its source tree with: FORCE_CUDA=1 pip install --force-reinstall --no-deps .");
  return *backend;
}

const Backend& choose_gemm(c10::Device device, const GemmArgs& args, std::string* reason) {
  if (under_test && !under_test->why_not(args)) return *under_test;
  const auto because = [reason](const char* text) {
    if (reason) *reason = text;
  };
  const Backend* const kernels = backend_of(device.type());
  const char* obstacle = "amp_ext has no kernels here";
  if (kernels && kernels != &cpu_backend()) {
    obstacle = gemm_kernels ? kernels->why_not(args) : "AMP_EXT_GEMM is library, as by default";
    if (!obstacle && !is_verified(*kernels, family_of(args), device))
      obstacle = "the kernels have not passed their verification; see python -m amp_ext";
    if (!obstacle) {
      because("AMP_EXT_GEMM is kernel");
      return *kernels;
    }
  }
  if (device.is_cpu()) {
    obstacle = cpu_backend().why_not(args);
    if (!obstacle) {
      because("16-bit or FP32 operands on a CPU");
      return cpu_backend();
    }
  }
  because(obstacle);
  return torch_library();
}

}  // namespace amp_ext
