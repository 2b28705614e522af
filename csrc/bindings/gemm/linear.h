// The ops of layers for C++ callers, through the dispatcher, and what they share. amp_ext.ops
// documents each.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "gemm/gemm.h"

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

// Checks a layer whose input is `entering`, along one of its dimensions.
void check_layer(const char* op, const char* entering_name, const at::Tensor& entering, int64_t dim,
                 const char* weight_name, const at::Tensor& weight, const char* bias_name,
                 const OptionalTensor& bias);

// The options of a product of a layer's input and its weight.
inline GemmOptions layer(const OptionalTensor& bias, std::string_view activation = "none") {
  return {.trans_b = true, .bias = bias, .activation = activation};
}

}  // namespace amp_ext
