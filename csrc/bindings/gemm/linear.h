// The ops of layers for C++ callers, through the dispatcher. amp_ext.ops documents each.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

namespace amp_ext {

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias, std::string_view activation,
                  bool accumulate_grad);

at::Tensor mlp(const at::Tensor& x, const at::Tensor& weight1,
               const std::optional<at::Tensor>& bias1, const at::Tensor& weight2,
               const std::optional<at::Tensor>& bias2, std::string_view activation,
               bool accumulate_grad);

}  // namespace amp_ext
