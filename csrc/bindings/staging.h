// Memory on its way from the host to a device.
#pragma once

#include <ATen/core/Tensor.h>

namespace amp_ext {

inline at::TensorOptions bytes_on(c10::Device device) {
  return at::TensorOptions(at::kByte).device(device);
}

// What a captured graph copies from at every replay is kept for the life of the process, since a
// graph does not say when it goes. (Device memory that a capture allocates belongs to the graph.)
void keep_for_graph(at::Tensor staged);

}  // namespace amp_ext
