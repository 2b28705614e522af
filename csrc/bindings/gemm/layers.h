// Calls the ops of layers through the dispatcher. amp_ext.ops documents each op.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

namespace amp_ext {

using OptionalTensor = std::optional<at::Tensor>;

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                  std::string_view activation);

at::Tensor mlp(const at::Tensor& x, const at::Tensor& weight1, const OptionalTensor& bias1,
               const at::Tensor& weight2, const OptionalTensor& bias2, std::string_view activation);

at::Tensor gated_mlp(const at::Tensor& x, const at::Tensor& gate_weight,
                     const OptionalTensor& gate_bias, const at::Tensor& up_weight,
                     const OptionalTensor& up_bias, const at::Tensor& down_weight,
                     const OptionalTensor& down_bias, std::string_view activation);

}  // namespace amp_ext
