// Defines the interface of a shared library that contains a backend.
//
// The library exports one symbol, amp_ext_backend_library, and needs neither torch nor Python. One
// file therefore serves all versions of both. Exceptions of the host's functions (Host, Services)
// may pass through it.
#pragma once

#include "amp_ext/backend.h"
#include "amp_ext/host.h"

namespace amp_ext {

// Describes the library. A loader compares `abi` first, and reads only `version` after a mismatch:
// both keep their offsets in all versions.
struct BackendLibrary {
  const char* abi;  // AMP_EXT_ABI of the build: a hash of all headers in csrc/include
  const char* version;
  const Backend& (*backend)(const Host&);  // the backend keeps a copy of the Host
  const char* architectures;  // GPU targets in the form of TORCH_CUDA_ARCH_LIST; empty for a CPU
};

}  // namespace amp_ext

// Each library defines this as {AMP_EXT_ABI, AMP_EXT_VERSION, ...}.
extern "C" __attribute__((visibility("default")))
const amp_ext::BackendLibrary amp_ext_backend_library;
