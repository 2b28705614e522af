// Registers the functions of an op.
#pragma once

#include <ATen/core/stack.h>
#include <torch/library.h>

#include <utility>

namespace amp_ext {

// Implements an op by one function for all devices, and by one for tensors without data ("fake"
// ones), for torch.compile. The former chooses a backend. amp_ext/ops has the op's schema:
//
//     TORCH_LIBRARY_FRAGMENT(amp_ext, m) {
//       implement(m, "scale_", TORCH_FN(scale_op), TORCH_FN(scale_fake));
//     }
template <class Function, class Fake>
void implement(torch::Library& m, const char* name, Function function, Fake fake) {
  // Sparse tensors and empty lists reach the op's checks too.
  m.impl(name, torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, function));
  m.impl(name, torch::dispatch(c10::DispatchKey::Meta, std::move(fake)));
}

// Checks that all tensors of a call without data are on one device. A result is
// taken to be a float32 number.
void check_devices(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Implements an op on lists. Without data, only devices are checked.
template <class Function>
void implement(torch::Library& m, const char* name, Function function) {
  implement(m, name, function, torch::CppFunction::makeFromBoxedFunction<&check_devices>());
}

}  // namespace amp_ext
