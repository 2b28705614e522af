// What a launcher returns. Bindings turn everything but `ok` into an exception.
#pragma once

namespace amp_ext {

enum class Status {
  ok,
  list_too_long,    // more numbers than fit the kernel's parameters
  too_many_chunks,  // the list needs 2^29 chunks or more
  launch_failed,    // the CUDA runtime refused; cudaGetLastError() says why
  no_tensor_map,    // the driver refused to describe a tensor to TMA
  not_compiled,     // a kernel has to be compiled, which a capture of a CUDA graph excludes
  not_built,        // the kernel was left out of this build
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
