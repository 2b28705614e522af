// Loads backends from shared libraries.
#include "amp_ext/library.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <pybind11/pybind11.h>

#include <cstring>
#include <memory>

#include "backends/backends.h"

namespace amp_ext {
namespace {

constexpr const char* kSymbol = "amp_ext_backend_library";

const Backend* cpu_kernels = nullptr;
const Backend* cuda_kernels = nullptr;

}  // namespace

std::string load_backend(const std::string& path, const std::string& remedy) {
  const auto refuse = [&](const std::string& why) {
    throw pybind11::import_error("amp_ext cannot use the library " + path + ", " + why + "; " +
                                 remedy);
  };
  std::unique_ptr<void, int (*)(void*)> file(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL), dlclose);
  if (!file) refuse(std::string("which does not load (") + dlerror() + ")");
  const auto* const library = static_cast<const BackendLibrary*>(dlsym(file.get(), kSymbol));
  if (!library) refuse(std::string("which has no symbol ") + kSymbol);
  if (std::strcmp(library->abi, AMP_EXT_ABI) != 0)
    refuse("which is of amp_ext " + std::string(library->version) + " with the interface " +
           library->abi + ", where amp_ext " AMP_EXT_VERSION " needs " AMP_EXT_ABI);
  const Backend& backend = library->backend(host());
  (std::strcmp(backend.name(), "cuda") == 0 ? cuda_kernels : cpu_kernels) = &backend;
  file.release();  // for good
  return library->architectures;
}

const Backend& cpu_backend() {
  TORCH_CHECK(cpu_kernels, "amp_ext: the library of its CPU kernels has not been loaded");
  return *cpu_kernels;
}

const Backend* cuda_backend() { return cuda_kernels; }

}  // namespace amp_ext
