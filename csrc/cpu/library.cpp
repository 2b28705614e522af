#include "amp_ext/library.h"

#include "backend.h"

namespace {

const amp_ext::Backend& backend(const amp_ext::Host& host) {
  static const amp_ext::cpu::CpuBackend backend(host);
  return backend;
}

}  // namespace

const amp_ext::BackendLibrary amp_ext_backend_library{AMP_EXT_ABI, AMP_EXT_VERSION, backend, ""};
