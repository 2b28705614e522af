// unscale_.
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <cmath>

#include "lists/lists.h"
#include "lists/run.h"
#include "op.h"

namespace amp_ext {

void unscale_(GradList& grads, const at::Tensor& found_inf, const at::Tensor& inv_scale,
              const std::optional<at::Tensor>& norm, std::optional<double> max_norm,
              Others others) {
  const at::Device device = grads.device();
  check_max_norm(grads.op(), max_norm, norm.has_value());
  Arguments arguments(grads.op(), device);
  UnscaleArgs args{};
  args.inv_scale = arguments.read<float>("inv_scale", inv_scale);
  args.found_inf = arguments.write<float>("found_inf", found_inf);
  args.norm = arguments.read<float>("norm", norm);
  if (others == Others::given) arguments.check_apart_from(grads);
  args.max_norm = static_cast<float>(max_norm.value_or(INFINITY));
  args.grads = grads.args();
  run(grads.op(), device, &Backend::unscale, args);
  grads.finish_writes();
  arguments.mark_written();
}

namespace {

// unscale_ on the boxed list of Python's call: unboxing would cost two atomic operations per
// tensor.
void unscale_op(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  {
    const auto arguments = torch::jit::last(*stack, 5);
    const at::Tensor& found_inf = arguments[1].toTensor();
    GradList grads =
        checked("amp_ext::unscale_", Access::write, arguments[0].toListRef(), found_inf.device());
    unscale_(grads, found_inf, arguments[2].toTensor(), arguments[3].toOptional<at::Tensor>(),
             arguments[4].toOptional<double>(), Others::given);
  }
  torch::jit::drop(*stack, 5);
}

void unscale_fake(at::TensorList grads, at::Tensor& found_inf, const at::Tensor& inv_scale,
                  const std::optional<at::Tensor>& norm, std::optional<double> max_norm) {
  constexpr auto op = "amp_ext::unscale_";
  check_max_norm(op, max_norm, norm.has_value());
  check_devices(op, found_inf.device(), "grads", grads, "inv_scale", inv_scale, "norm", norm);
}

}  // namespace

Status TorchLists::unscale(const UnscaleArgs& args, Services& services) const {
  const TorchCall call(services);
  std::vector<at::Tensor> grads = call.tensors(args.grads);
  at::Tensor found_inf = call.scalar(args.found_inf), factor = call.scalar(args.inv_scale);
  at::Tensor coefficient = at::ones({}, factor.options());
  if (args.norm) {
    const at::Tensor norm = call.scalar(args.norm), finite = at::isfinite(norm);
    const at::Tensor clip = at::clamp((norm + 1e-6).reciprocal() * args.max_norm, std::nullopt, 1);
    factor = at::where(finite, factor, coefficient);
    coefficient = at::where(finite, clip, coefficient);
    found_inf.masked_fill_(finite.logical_not(), 1);
  }
  const auto is_bf16 = [](const at::Tensor& grad) { return grad.scalar_type() == at::kBFloat16; };
  if (args.norm || std::ranges::any_of(grads, is_bf16)) {
    for (at::Tensor& grad : grads) grad.copy_(widened(grad) * factor * coefficient);
  } else {  // one launch; torch has it for other dtypes than BF16
    at::_amp_foreach_non_finite_check_and_unscale_(grads, found_inf, factor);
  }
  call.check_finite(grads, args.found_inf);
  return Status::ok;
}

TORCH_LIBRARY_FRAGMENT(amp_ext, m) {
  define(m, "lists",
         "unscale_(Tensor(a!)[] grads, Tensor(b!) found_inf, Tensor inv_scale, *, "
         "Tensor? norm=None, float? max_norm=None) -> ()",
         Boxed<unscale_op>{}, TORCH_FN(unscale_fake));
}

}  // namespace amp_ext
