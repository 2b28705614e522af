// The ops on tensors without data: shapes, dtypes and devices for torch.compile and fake tensors.
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "cast_args.h"
#include "gemm.h"
#include "tensor_args.h"

namespace amp_ext {
namespace {

void on_same_device(const char* op, at::Device device, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.device() == device, op,
              ": Expected all tensors to be on the same device, but found ", device, " and ",
              tensor.device());
}

void on_same_device(const char* op, at::Device device, const std::optional<at::Tensor>& tensor) {
  if (tensor) on_same_device(op, device, *tensor);
}

void on_same_device(const char* op, at::Device device, at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) on_same_device(op, device, tensor);
}

template <class... Tensors>
void all_on_same_device(const char* op, at::Device device, const Tensors&... tensors) {
  (on_same_device(op, device, tensors), ...);
}

void unscale_(at::TensorList grads, at::Tensor& found_inf, const at::Tensor& inv_scale,
              const std::optional<at::Tensor>& norm, std::optional<double> max_norm) {
  constexpr auto op = "amp_ext::unscale_";
  check_max_norm(op, max_norm, norm.has_value());
  all_on_same_device(op, found_inf.device(), grads, inv_scale, norm);
}

void check_finite(at::TensorList grads, at::Tensor& found_inf) {
  all_on_same_device("amp_ext::check_finite", found_inf.device(), grads);
}

at::Tensor grad_norm(at::TensorList grads, at::Tensor& found_inf,
                     const std::optional<at::Tensor>& inv_scale,
                     const std::optional<at::Tensor>& norms) {
  all_on_same_device("amp_ext::grad_norm", found_inf.device(), grads, inv_scale, norms);
  return at::empty({}, found_inf.options().dtype(at::kFloat));
}

void cast_(at::TensorList outputs, at::TensorList inputs) {
  check_cast_lengths(outputs.size(), inputs.size());
  if (outputs.empty()) return;
  all_on_same_device(kCast, outputs[0].device(), outputs, inputs);
  for (size_t i = 0; i < outputs.size(); ++i)
    check_cast_shapes(i, outputs[i].sym_sizes(), inputs[i].sym_sizes());
}

void update_scale_(at::Tensor& scale, at::Tensor& growth_tracker, at::TensorList found_infs, double,
                   double, int64_t, std::optional<double>, std::optional<double>, int64_t,
                   const std::optional<at::Tensor>& hysteresis_tracker,
                   const std::optional<at::Tensor>& skipped_steps) {
  all_on_same_device("amp_ext::update_scale_", scale.device(), growth_tracker, found_infs,
                     hysteresis_tracker, skipped_steps);
}

at::Tensor new_out(const at::Tensor& a, const at::Tensor& b, c10::SymIntArrayRef sizes,
                   const GemmOptions& options) {
  return at::empty_symint(sizes, a.options().dtype(out_dtype_of(a, b, options.out_dtype)));
}

at::Tensor gemm_meta(const at::Tensor& a, const at::Tensor& b, const GemmOptions& options) {
  return new_out(a, b, check_gemm<c10::SymInt>(kGemm, a, b, options), options);
}

TensorPair gemm_with_aux_meta(const at::Tensor& a, const at::Tensor& b,
                              const GemmOptions& options) {
  const auto sizes = check_gemm<c10::SymInt>(kGemmWithAux, a, b, options);
  return {new_out(a, b, sizes, options), new_out(a, b, sizes, options)};
}

TensorPair gemm_times_derivative_meta(const at::Tensor& a, const at::Tensor& b,
                                      const at::Tensor& aux, const GemmOptions& options) {
  const auto sizes = check_gemm_times_derivative<c10::SymInt>(a, b, aux, options);
  const at::Tensor out = new_out(a, b, sizes, options);
  return {out, at::empty_symint({sizes.back()}, out.options().dtype(sums_dtype_of(a, b)))};
}

}  // namespace

TORCH_LIBRARY_IMPL(amp_ext, Meta, m) {
  m.impl("gemm", TORCH_FN(gemm_op<gemm_meta>));
  m.impl("gemm_with_aux", TORCH_FN(gemm_op<gemm_with_aux_meta>));
  m.impl("gemm_times_derivative", TORCH_FN(gemm_times_derivative_op<gemm_times_derivative_meta>));
  m.impl("gemm_accumulate_", TORCH_FN(gemm_accumulate_op<check_gemm_accumulate<c10::SymInt>>));
  m.impl("unscale_", TORCH_FN(unscale_));
  m.impl("check_finite", TORCH_FN(check_finite));
  m.impl("grad_norm", TORCH_FN(grad_norm));
  m.impl("update_scale_", TORCH_FN(update_scale_));
  m.impl("cast_", TORCH_FN(cast_));
}

}  // namespace amp_ext
