// A shared library with a backend. It exports one symbol, amp_ext_backend_library, and needs
// neither torch nor Python, so that one file serves all versions of them. Errors of the host's
// functions (Host, Services) may pass through it as C++ exceptions.
#pragma once

#include "amp_ext/backend.h"
#include "amp_ext/host.h"

namespace amp_ext {

// Whoever loads a library reads `abi` first, and nothing but `version` where it is another one: the
// two stay where they are in all versions.
struct BackendLibrary {
  const char* abi;  // a hash of all headers in csrc/include, AMP_EXT_ABI of the build
  const char* version;
  const Backend& (*backend)(const Host&);  // of which it keeps a copy
  const char* architectures;  // of a GPU's code, as TORCH_CUDA_ARCH_LIST has them; else empty
};

}  // namespace amp_ext

// A library defines it as {AMP_EXT_ABI, AMP_EXT_VERSION, ...}.
extern "C" __attribute__((visibility("default")))
const amp_ext::BackendLibrary amp_ext_backend_library;
