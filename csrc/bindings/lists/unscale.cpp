// unscale_.
#include <cmath>

#include "backends/backends.h"
#include "backends/triton.h"
#include "lists/lists.h"
#include "op.h"

namespace amp_ext {

void unscale_(GradList& grads, const at::Tensor& found_inf, const at::Tensor& inv_scale,
              const std::optional<at::Tensor>& norm, std::optional<double> max_norm) {
  const at::Device device = grads.device();
  check_max_norm(grads.op(), max_norm, norm.has_value());
  Arguments arguments(grads.op(), device);
  UnscaleArgs args{};
  args.inv_scale = arguments.read<float>("inv_scale", inv_scale);
  args.found_inf = arguments.write<float>("found_inf", found_inf);
  args.norm = arguments.read<float>("norm", norm);
  arguments.check_apart(&grads);
  args.max_norm = static_cast<float>(max_norm.value_or(INFINITY));
  args.grads = grads.args();
  run("amp_ext::unscale_", device, &Backend::unscale, args);  // within a pass of another op too
  grads.finish_writes();
  arguments.mark_written();
}

namespace {

void unscale_op(at::TensorList grads, at::Tensor& found_inf, const at::Tensor& inv_scale,
                const std::optional<at::Tensor>& norm, std::optional<double> max_norm) {
  GradList list = checked("amp_ext::unscale_", Access::write, grads, found_inf.device());
  unscale_(list, found_inf, inv_scale, norm, max_norm);
}

}  // namespace

Status TritonBackend::unscale(const UnscaleArgs& a, Services& services) const {
  return launch_list("lists.unscale", "unscale_", a.grads, services, a.norm != nullptr,
                     address(a.inv_scale), address(a.found_inf), address(a.norm), a.max_norm);
}

TORCH_LIBRARY_FRAGMENT(amp_ext, m) { implement(m, "unscale_", TORCH_FN(unscale_op)); }

}  // namespace amp_ext
