#include "op.h"

#include <ATen/ops/empty.h>

#include <optional>

#include "checks/tensors.h"

namespace amp_ext {

void check_devices(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
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

}  // namespace amp_ext
