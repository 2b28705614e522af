// Registers the functions of an op.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <optional>

#include "checks/tensors.h"

namespace amp_ext {

// Implements an op by one function for all devices, and by one for tensors without data ("fake"
// ones), for torch.compile. The former chooses a backend. amp_ext/ops has the op's schema:
//
//     TORCH_LIBRARY_FRAGMENT(amp_ext, m) {
//       implement(m, "scale_", TORCH_FN(scale_op), TORCH_FN(scale_fake));
//     }
template <class Function, class Fake>
void implement(torch::Library& m, const char* name, Function function, Fake fake) {
  using Key = c10::DispatchKey;
  // Sparse tensors reach the op's checks: their errors name the argument.
  for (const Key key : {Key::CPU, Key::CUDA, Key::SparseCPU, Key::SparseCUDA, Key::SparseCsrCPU,
                        Key::SparseCsrCUDA})
    m.impl(name, torch::dispatch(key, function));
  m.impl(name, torch::dispatch(Key::Meta, fake));
}

// ---- functions on tensors without data ---------------------------------------------------------

inline void check_device(const char* op, const char* name, const std::optional<at::Tensor>& tensor,
                         at::Device device) {
  if (tensor) check_device(op, name, *tensor, device);
}
inline void check_device(const char* op, const char* name, at::TensorList tensors,
                         at::Device device) {
  for (size_t i = 0; i < tensors.size(); ++i)
    check_device(op, Item{op, name, i}, tensors[i], device);
}

// Checks arguments by name: check_devices(op, device, "grads", grads, "norm", norm).
template <class Tensors, class... Others>
void check_devices(const char* op, at::Device device, const char* name, const Tensors& tensors,
                   const Others&... others) {
  check_device(op, name, tensors, device);
  if constexpr (sizeof...(others) > 0) check_devices(op, device, others...);
}

}  // namespace amp_ext
