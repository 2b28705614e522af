// unscale_.
#include <cmath>

#include "backends/backends.h"
#include "backends/triton.h"
#include "checks/tensors.h"
#include "op.h"

namespace amp_ext {
namespace {

void unscale_op(at::TensorList grads, at::Tensor& found_inf, const at::Tensor& inv_scale,
                const std::optional<at::Tensor>& norm, std::optional<double> max_norm) {
  constexpr auto op = "amp_ext::unscale_";
  GradList list(op, Access::write, grads, found_inf.device());
  check_max_norm(op, max_norm, norm.has_value());
  Arguments arguments(op, found_inf.device());
  UnscaleArgs args{};
  args.inv_scale = arguments.read<float>("inv_scale", inv_scale);
  args.found_inf = arguments.write<float>("found_inf", found_inf);
  args.norm = arguments.read<float>("norm", norm);
  arguments.check_apart(&list);
  args.max_norm = static_cast<float>(max_norm.value_or(INFINITY));
  args.grads = list.args();
  run(op, list.device(), &Backend::unscale, args);
  list.finish_writes();
  arguments.mark_written();
}

}  // namespace

Status TritonBackend::unscale(const UnscaleArgs& a, Services& services) const {
  return launch_list("lists.unscale", "unscale_", a.grads, services, a.norm != nullptr,
                     address(a.inv_scale), address(a.found_inf), address(a.norm), a.max_norm);
}

TORCH_LIBRARY_FRAGMENT(amp_ext, m) { implement(m, "unscale_", TORCH_FN(unscale_op)); }

}  // namespace amp_ext
