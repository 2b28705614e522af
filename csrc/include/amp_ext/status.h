// The result of a launcher. The bindings raise an exception for each value but `ok`.
#pragma once

namespace amp_ext {

enum class Status {
  ok,
  list_too_long,    // the kernel's parameters cannot hold the list
  too_many_chunks,  // the list has 2^29 chunks or more
  launch_failed,    // the CUDA runtime failed; see cudaGetLastError()
  no_tensor_map,    // the driver cannot encode a tensor map
  not_compiled,     // the kernel is not compiled, and a capture of a CUDA graph excludes that
  not_built,        // this build lacks the kernel
};

constexpr const char* text(Status status) {
  switch (status) {
    case Status::ok: return "ok";
    case Status::list_too_long: return "the list is too long for the kernel's parameters";
    case Status::too_many_chunks: return "the list holds more elements than one launch can address";
    case Status::launch_failed: return "the CUDA runtime refused the launch";
    case Status::no_tensor_map: return "the driver refused a tensor map";
    case Status::not_compiled: return "the kernel has not been compiled: run one step before";
    case Status::not_built: return "the planned kernel is not in this build";
  }
  return "unknown status";
}

}  // namespace amp_ext
