// Registers the functions of an op.
#pragma once

#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

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
  // Sparse tensors and empty lists reach the op's checks too.
  m.impl(name, torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, function));
  m.impl(name, torch::dispatch(c10::DispatchKey::Meta, std::move(fake)));
}

// Checks that all tensors of a call without data are on one device. A result is a float32 number.
inline void check_devices(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const char* const op_name = op.schema().name().c_str();
  std::optional<at::Device> device;
  const auto check = [&](const auto& name, const at::Tensor& tensor) {
    if (!device) device = tensor.device();
    check_device(op_name, name, tensor, *device);
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = torch::jit::peek(*stack, i, arguments.size());
    const std::string& name = arguments[i].name();
    if (value.isTensor()) check(name, value.toTensor());
    if (!value.isTensorList()) continue;
    const std::vector<at::Tensor> tensors = value.toTensorVector();
    for (size_t k = 0; k < tensors.size(); ++k) check(Item{op_name, name.c_str(), k}, tensors[k]);
  }
  torch::jit::drop(*stack, arguments.size());
  if (!op.schema().returns().empty())
    stack->emplace_back(at::empty({}, at::TensorOptions(at::kFloat).device(device)));
}

// Implements an op on lists. Without data, only devices are checked.
template <class Function>
void implement(torch::Library& m, const char* name, Function function) {
  implement(m, name, function, torch::CppFunction::makeFromBoxedFunction<&check_devices>());
}

}  // namespace amp_ext
