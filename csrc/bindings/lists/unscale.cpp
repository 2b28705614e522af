// unscale_.
#include <cmath>

#include "backends/triton.h"
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
  run("amp_ext::unscale_", device, &Backend::unscale, args);  // within a pass of another op too
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

void add_arguments(ReferenceCall& call, const UnscaleArgs& args) {
  call.add("grads", args.grads);
  call.add("found_inf", args.found_inf);
  call.add("inv_scale", args.inv_scale);
  call.add("norm", args.norm);
  call.add("max_norm", args.max_norm);
}

Status TritonBackend::unscale(const UnscaleArgs& a, Services& services) const {
  static TritonFunction function("lists.unscale", "unscale_");
  return launch_list(function, a.grads, services, a.norm != nullptr, address(a.inv_scale),
                     address(a.found_inf), address(a.norm), a.max_norm);
}

TORCH_LIBRARY_FRAGMENT(amp_ext, m) {
  implement(m, "unscale_", Boxed<unscale_op>{}, TORCH_FN(unscale_fake));
}

}  // namespace amp_ext
