// Computes linear: a product with a weight as torch.nn.Linear stores it.
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "gemm/gemm.h"

namespace amp_ext {

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias) {
  constexpr auto kLinear = "amp_ext::linear";
  check_operand(kLinear, "x", x, x.device());
  check_operand(kLinear, "weight", weight, x.device());
  if (bias) check_operand(kLinear, "bias", *bias, x.device());
  TORCH_CHECK(weight.dim() == 2, kLinear, ": weight must have 2 dimensions, got shape ",
              weight.sym_sizes());
  TORCH_CHECK(x.dim() >= 1 && x.sym_size(-1) == weight.sym_size(1), kLinear, ": x must have ",
              weight.sym_size(1), " columns for weight of shape ", weight.sym_sizes(),
              ", got shape ", x.sym_sizes());
  TORCH_CHECK(!bias || (bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0)), kLinear,
              ": bias must have shape [", weight.sym_size(0), "], got shape ", bias->sym_sizes());
  if (x.dim() == 1) return amp_ext::linear(x.unsqueeze(0), weight, bias).squeeze(0);
  return gemm(x, weight, {.trans_b = true, .bias = bias});
}

TORCH_LIBRARY_FRAGMENT(amp_ext, m) {
  m.impl("linear", torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(linear)));
}

}  // namespace amp_ext
