// grad_norm.
#include <ATen/ops/empty.h>

#include "backends/backends.h"
#include "backends/triton.h"
#include "checks/tensors.h"
#include "op.h"

namespace amp_ext {
namespace {

at::Tensor grad_norm_op(at::TensorList grads, at::Tensor& found_inf,
                        const std::optional<at::Tensor>& inv_scale) {
  constexpr auto op = "amp_ext::grad_norm";
  GradList list(op, Access::read, grads, found_inf.device());
  Arguments arguments(op, found_inf.device());
  GradNormArgs args{};
  args.grads = list.args();
  args.found_inf = arguments.write<float>("found_inf", found_inf);
  args.inv_scale = arguments.read<float>("inv_scale", inv_scale);
  arguments.check_apart(&list);
  const at::Tensor norm = at::empty({}, found_inf.options());
  args.norm = norm.mutable_data_ptr<float>();
  run(op, list.device(), &Backend::grad_norm, args);
  arguments.mark_written();
  return norm;
}

}  // namespace

Status TritonBackend::grad_norm(const GradNormArgs& a, Services& services) const {
  void* const partial_sums = services.scratch(kGradNormMaxBlocks * sizeof(double));
  return launch_list("lists.grad_norm", "grad_norm", a.grads, services, true, address(a.inv_scale),
                     address(a.found_inf), address(a.norm), address(partial_sums),
                     address(services.tickets(1)));
}

TORCH_LIBRARY_FRAGMENT(amp_ext, m) { implement(m, "grad_norm", TORCH_FN(grad_norm_op)); }

}  // namespace amp_ext
